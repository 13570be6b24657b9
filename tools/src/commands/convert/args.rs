//! The arguments of `import` and `export`.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use megatron::checkpoint::Float;

/// Convert a Hugging Face model or a Megatron-LM checkpoint into a checkpoint
///
/// A folder with config.json is a Hugging Face model: config.json and *.safetensors of GPT-2,
/// Llama, Mistral, Qwen2 and Bloom models are read. A folder with latest_checkpointed_iteration.txt
/// or .metadata is Megatron-LM's or Megatron-Core's. Checkpoints in the format torch_dist are read,
/// under any layout, with the arguments that they record. Only weights are taken, so the optimizer
/// starts fresh.
///
/// One tensor is read at a time, and keeps its dtype. A feature that this program does not support
/// is refused by name. No file in CKPT is replaced.
#[derive(Args, Clone, Debug)]
pub struct ImportArgs {
    /// Folder of a Hugging Face model or of Megatron-LM's checkpoints (the latest is taken), or one
    /// of their iter_... folders
    #[arg(value_name = "HF_DIR|MEGATRON_DIR")]
    pub from: PathBuf,
    /// Folder to write the checkpoint to; created if missing, and must not hold a checkpoint or a
    /// Hugging Face model
    #[arg(value_name = "CKPT")]
    pub to: PathBuf,
    /// Tokens of the tokenizer, for a Megatron-LM checkpoint that does not record them [default:
    /// the recorded number, else the padded vocabulary]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab_size: Option<u32>,
}

/// Convert a checkpoint into a Hugging Face model
///
/// Writes config.json, weights in shards with an index, generation_config.json, and the tokenizer's
/// files if they are beside the checkpoint, in the form that transformers loads.
#[derive(Args, Clone, Debug)]
pub struct ExportArgs {
    /// Folder of checkpoints (the latest is taken), or one of its iter_... folders
    #[arg(value_name = "CKPT")]
    pub from: PathBuf,
    /// Folder to write to; must be empty or missing
    #[arg(value_name = "HF_DIR")]
    pub to: PathBuf,
    /// Largest size of one file in bytes, or with a unit (KB, MB, GB: powers of 1000; KiB, MiB,
    /// GiB: of 1024)
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = byte_size)]
    pub max_shard_size: u64,
    /// Dtype of the weights: fp32, bf16, fp16 [default: the stored dtype]
    #[arg(long, value_name = "DTYPE", value_parser = dtypes())]
    pub dtype: Option<Float>,
}

fn byte_size(text: &str) -> std::result::Result<u64, String> {
    const UNITS: [(&str, u64); 8] = [
        ("", 1),
        ("B", 1),
        ("KB", 1000),
        ("MB", 1000 * 1000),
        ("GB", 1000 * 1000 * 1000),
        ("KIB", 1 << 10),
        ("MIB", 1 << 20),
        ("GIB", 1 << 30),
    ];
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let unit = unit.trim().to_uppercase();
    UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .and_then(|(_, factor)| number.parse::<u64>().ok()?.checked_mul(*factor))
        .filter(|size| *size > 0)
        .ok_or_else(|| "a size is a whole number and a unit, such as 5GB or 500MiB".to_string())
}

/// Each dtype with its other names, so that a shell completes the first.
fn dtypes() -> impl TypedValueParser<Value = Float> {
    let known: [(&str, &[&str]); 3] =
        [("fp32", &["float32", "f32"]), ("bf16", &["bfloat16"]), ("fp16", &["float16", "f16"])];
    let known =
        known.map(|(name, others)| PossibleValue::new(name).aliases(others.iter().copied()));
    PossibleValuesParser::new(known).map(|name| match name.as_str() {
        "fp32" | "float32" | "f32" => Float::F32,
        "bf16" | "bfloat16" => Float::Bf16,
        _ => Float::F16,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shells_complete_dtypes() {
        let known: Vec<_> =
            dtypes().possible_values().unwrap().map(|value| value.get_name().to_string()).collect();
        assert_eq!(known, ["fp32", "bf16", "fp16"]);
        let command = clap::Command::new("x").arg(clap::Arg::new("y").value_parser(dtypes()));
        for (word, dtype) in [
            ("float32", Float::F32),
            ("bfloat16", Float::Bf16),
            ("bf16", Float::Bf16),
            ("f16", Float::F16),
        ] {
            let matches = command.clone().try_get_matches_from(["x", word]).unwrap();
            assert!(matches.get_one::<Float>("y") == Some(&dtype), "{word}");
        }
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(byte_size("5GB"), Ok(5_000_000_000));
        assert_eq!(byte_size("2 MiB"), Ok(2 << 20));
        assert_eq!(byte_size("12"), Ok(12));
        for wrong in ["", "GB", "0", "-1", "5 elephants", "99999999999999999999"] {
            assert!(byte_size(wrong).is_err(), "{wrong}");
        }
    }
}
