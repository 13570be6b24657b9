//! Identifies a path that is not the requested kind, and gives the command that helps.

use std::fs;
use std::path::Path;

use super::folder::holds_any;
use super::manifest::MANIFEST;
use crate::files::could_be_of_the_hub;

/// The script that DeepSpeed puts beside its checkpoints to convert them to one file of weights.
const ZERO_TO_FP32: &str = "zero_to_fp32.py";

/// The kind of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    Missing,
    /// Not a folder.
    File,
    /// A checkpoint of this program, or a folder of them.
    Ours,
    /// A Hugging Face model: `config.json`, or files of weights.
    HuggingFace,
    /// A LoRA adapter of a model.
    Adapter,
    /// A checkpoint of Megatron-LM.
    MegatronLm,
    /// A checkpoint of DeepSpeed.
    DeepSpeed,
}

impl Found {
    /// The kind of `path`; `None` if it is unknown.
    pub fn at(path: &Path) -> Option<Self> {
        let Ok(meta) = path.metadata() else { return Some(Self::Missing) };
        if !meta.is_dir() {
            return Some(Self::File);
        }
        let names: Vec<String> = fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        let any = |is: &dyn Fn(&str) -> bool| names.iter().any(|name| is(name));
        if any(&|name| name == MANIFEST) {
            return Some(Self::Ours);
        }
        if any(&|name| name == "adapter_config.json") {
            return Some(Self::Adapter);
        }
        // A trainer's checkpoint may be both; the kind of weights decides.
        let weights = |name: &str| {
            [".safetensors", ".bin", ".pth", ".gguf"].iter().any(|end| name.ends_with(end))
        };
        let deepspeed = |name: &str| {
            let of_ranks = name.starts_with("zero_pp_rank_") || name.ends_with("_model_states.pt");
            name == ZERO_TO_FP32 || of_ranks || name.starts_with("global_step")
        };
        if any(&deepspeed) && !any(&weights) {
            return Some(Self::DeepSpeed);
        }
        if any(&|name| name == "config.json") {
            return Some(Self::HuggingFace);
        }
        let megatrons =
            |name: &str| name.starts_with("mp_rank_") || [".metadata", "common.pt"].contains(&name);
        let mut pointed =
            names.iter().filter(|name| name.starts_with("iter_") || *name == "release");
        if any(&megatrons)
            || pointed.any(|name| Self::at(&path.join(name)) == Some(Self::MegatronLm))
        {
            return Some(Self::MegatronLm);
        }
        // Rank files without a manifest are an incomplete checkpoint of this program.
        let models = |name: &str| name.ends_with(".safetensors") && !name.starts_with("rank_");
        if any(&|name| models(name) || name.starts_with("pytorch_model")) {
            return Some(Self::HuggingFace);
        }
        holds_any(path).is_ok_and(|holds| holds).then_some(Self::Ours)
    }

    /// A message for `path`, where a checkpoint or a Hugging Face folder is expected: what it is,
    /// and what to do with it.
    pub fn advice(self, path: &Path) -> String {
        let shown = path.display();
        match self {
            Self::Missing if could_be_of_the_hub(path) => format!(
                "does not exist; if it is the name of a model on the Hugging Face hub, download it \
                 first: `hf download {shown} --local-dir DIR`, and give DIR"
            ),
            Self::Missing => "does not exist".into(),
            Self::File => "is a file; give its folder".into(),
            Self::Ours => {
                "is a checkpoint of this program and needs no import: --load it, with --finetune to start at the first step".into()
            }
            Self::HuggingFace => "holds a Hugging Face model, not a checkpoint; start from it with \
                --init-from-hf, or convert it with `megatron import`"
                .into(),
            Self::Adapter => {
                "holds a LoRA adapter, not a model; merge it first with peft: \
                 AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained(NEW), \
                 and give NEW"
                    .into()
            }
            Self::MegatronLm => {
                format!("is a checkpoint of Megatron-LM; convert it with `megatron import {shown} NEW`, and --load NEW")
            }
            Self::DeepSpeed => format!(
                "is a checkpoint of DeepSpeed; in that folder, convert it to a Hugging Face model \
                 with `python {ZERO_TO_FP32} . HF --safe_serialization`, copy the model's \
                 config.json and tokenizer into HF, and give HF to --init-from-hf"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_told_by_their_files_and_names_of_the_hub_by_their_form() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str, files: &[&str]| {
            for file in files {
                let path = dir.path().join(name).join(file);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "").unwrap();
            }
            Found::at(&dir.path().join(name))
        };
        for (name, files, found) in [
            ("a", &["manifest.json"][..], Some(Found::Ours)),
            ("b", &["iter_0000005/manifest.json", "hf_config.json"], Some(Found::Ours)),
            ("c", &["config.json", "model.safetensors"], Some(Found::HuggingFace)),
            ("d", &["pytorch_model.bin"], Some(Found::HuggingFace)),
            ("e", &["adapter_config.json", "adapter_model.safetensors"], Some(Found::Adapter)),
            (
                "f",
                &["latest_checkpointed_iteration.txt", "iter_0000005/.metadata"],
                Some(Found::MegatronLm),
            ),
            (
                "g",
                &["latest_checkpointed_iteration.txt", "release/mp_rank_00/model_optim_rng.pt"],
                Some(Found::MegatronLm),
            ),
            (
                "h",
                &[
                    "latest",
                    "zero_to_fp32.py",
                    "global_step5/mp_rank_00_model_states.pt",
                    "config.json",
                ],
                Some(Found::DeepSpeed),
            ),
            ("i", &["global_step5/x"], Some(Found::DeepSpeed)),
            (
                "j",
                &["zero_to_fp32.py", "global_step5/x", "config.json", "model.safetensors"],
                Some(Found::HuggingFace),
            ),
            ("k", &["notes.txt"], None),
            ("l", &["iter_0000005/common.pt", "x.safetensors"], Some(Found::MegatronLm)),
        ] {
            assert_eq!(folder(name, files), found, "{files:?}");
        }
        assert_eq!(Found::at(&dir.path().join("k/notes.txt")), Some(Found::File));
        for (path, is_name) in [
            ("gpt2", true),
            ("Qwen/Qwen2-0.5B", true),
            ("/a/b", false),
            ("a/b/c", false),
            ("../a", false),
            ("a.json", false),
        ] {
            assert_eq!(could_be_of_the_hub(Path::new(path)), is_name, "{path}");
        }
        assert!(
            Found::Missing.advice(Path::new("gpt2")).contains("`hf download gpt2 --local-dir DIR`")
        );
    }
}
