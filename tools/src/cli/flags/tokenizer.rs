//! Selects the tokenizer, by this program's flags or by Megatron-LM's.

use std::path::{Path, PathBuf};

use clap::{ArgAction, Args};
use megatron::config::TokenizerOptions;
use megatron::data::TOKENIZER_FILE;

use crate::error::{Error, Result};

/// The flags of every command that tokenizes text.
#[derive(Args, Clone, Debug, Default)]
pub struct TokenizerFlags {
    /// `byte`, a tokenizer.json or its folder, `null:N` (numbers below N; with the end-of-document
    /// token N + 1 tokens), or, for `pretrain`, `train:VOCAB` to train a BPE of that size on the
    /// data (cached)
    #[arg(long, value_name = "TOKENIZER")]
    pub tokenizer: Option<String>,
    /// Megatron-LM's tokenizer type: GPT2BPETokenizer (--vocab-file, --merge-file),
    /// HuggingFaceTokenizer (--tokenizer-model) or NullTokenizer (--vocab-size); SentencePiece and
    /// tiktoken types need a tokenizer.json beside --tokenizer-model [default: inferred from the
    /// other flags]
    #[arg(long, value_name = "TYPE")]
    pub tokenizer_type: Option<String>,
    /// tokenizer.json or its folder, as for --tokenizer
    #[arg(long, value_name = "PATH")]
    pub tokenizer_model: Option<PathBuf>,
    /// vocab.json of GPT-2's BPE, with --merge-file
    #[arg(long, value_name = "FILE")]
    pub vocab_file: Option<PathBuf>,
    /// merges.txt of GPT-2's BPE, with --vocab-file
    #[arg(long, value_name = "FILE")]
    pub merge_file: Option<PathBuf>,
    /// Do not add the tokens that the tokenizer puts around a text, such as beginning-of-text, to
    /// documents and prompts
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub tokenizer_hf_no_include_special_tokens: bool,
    /// Treat special tokens that are spelled out in the text as ordinary text (transformers'
    /// split_special_tokens)
    #[arg(long, action = ArgAction::Set, default_value_t = false)]
    pub split_special_tokens: bool,
}

/// The tokenizer that [`TokenizerFlags`] select.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChosenTokenizer {
    /// The name to open, if flags give one.
    pub name: Option<String>,
    pub options: TokenizerOptions,
    /// A note on unexpected behaviour.
    pub note: Option<String>,
}

/// The advice for an unsupported type of tokenizer.
const CONVERT: &str = "give a tokenizer.json or its folder by --tokenizer; transformers makes one: AutoTokenizer.from_pretrained(DIR)\
    .save_pretrained(OUT)";

impl TokenizerFlags {
    /// The selected tokenizer; `vocab_size` is `--vocab-size`.
    ///
    /// # Errors
    /// If a required flag is missing, or the type of tokenizer is not supported.
    pub fn choose(&self, vocab_size: Option<usize>) -> Result<ChosenTokenizer> {
        let options = TokenizerOptions {
            merge_file: None,
            no_special_tokens: self.tokenizer_hf_no_include_special_tokens,
            split_special_tokens: self.split_special_tokens,
        };
        let others = [
            ("--tokenizer-type", self.tokenizer_type.is_some()),
            ("--tokenizer-model", self.tokenizer_model.is_some()),
            ("--vocab-file", self.vocab_file.is_some()),
            ("--merge-file", self.merge_file.is_some()),
        ];
        let others: Vec<&str> =
            others.into_iter().filter_map(|(name, given)| given.then_some(name)).collect();
        if let Some(name) = &self.tokenizer {
            let note = format!(
                "note: --tokenizer {name} selects the tokenizer; ignored: {}",
                others.join(", ")
            );
            let note = (!others.is_empty()).then_some(note);
            return Ok(ChosenTokenizer { name: Some(name.clone()), options, note });
        }
        let of = |name: &Path| ChosenTokenizer {
            name: Some(name.display().to_string()),
            options: options.clone(),
            note: None,
        };
        let kind =
            match (&self.tokenizer_type, &self.vocab_file, &self.merge_file, &self.tokenizer_model)
            {
                (Some(kind), ..) => kind.as_str(),
                (None, None, None, None) => {
                    return Ok(ChosenTokenizer { options, ..Default::default() });
                }
                (None, None, None, Some(_)) => "HuggingFaceTokenizer",
                _ => "GPT2BPETokenizer",
            };
        match kind {
            "GPT2BPETokenizer" => match (&self.vocab_file, &self.merge_file) {
                (Some(vocab), Some(merges)) => {
                    let options =
                        TokenizerOptions { merge_file: Some(merges.clone()), ..options.clone() };
                    Ok(ChosenTokenizer { options, ..of(vocab) })
                }
                (vocab, merges) => {
                    let alone = match (vocab, merges) {
                        (Some(vocab), _) => format!("--vocab-file {} alone", vocab.display()),
                        (_, Some(merges)) => format!("--merge-file {} alone", merges.display()),
                        _ => format!("--tokenizer-type {kind}"),
                    };
                    Err(Error::usage(format!(
                        "{alone}: GPT-2's BPE needs both --vocab-file vocab.json and --merge-file \
                         merges.txt; for other types {CONVERT}"
                    )))
                }
            },
            "NullTokenizer" => match vocab_size {
                Some(size) => Ok(of(Path::new(&format!("null:{size}")))),
                None => Err(Error::usage(
                    "--tokenizer-type NullTokenizer needs --vocab-size, the number of tokens without end-of-document",
                )),
            },
            "HuggingFaceTokenizer" => match &self.tokenizer_model {
                Some(model) if model.exists() => Ok(of(model)),
                Some(model) => Err(Error::usage(format!(
                    "--tokenizer-model {0}: there is no such file or folder; download a model of \
                     the Hugging Face hub first: hf download {0} --local-dir DIR",
                    model.display()
                ))),
                None => Err(Error::usage(
                    "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model, a tokenizer.json or its folder",
                )),
            },
            "SentencePieceTokenizer"
            | "GPTSentencePieceTokenizer"
            | "Llama2Tokenizer"
            | "TikTokenizer" => {
                let served = self.tokenizer_model.as_deref().and_then(served_by).ok_or_else(|| {
                    let model =
                        self.tokenizer_model.as_ref().map_or(String::new(), |model| format!(" ({})", model.display()));
                    Error::usage(format!(
                        "--tokenizer-type {kind}: files of this type{model} are not supported; {CONVERT}"
                    ))
                })?;
                let note = format!(
                    "note: --tokenizer-type {kind}: {}, which is beside the model, is used",
                    served.display()
                );
                Ok(ChosenTokenizer { note: Some(note), ..of(&served) })
            }
            "BertWordPieceLowerCase"
            | "BertWordPieceCase"
            | "MultimodalTokenizer"
            | "NullMultimodalTokenizer"
            | "SFTTokenizer" => {
                Err(Error::usage(format!("--tokenizer-type {kind} is not supported; {CONVERT}")))
            }
            _ => Err(Error::usage(format!(
                "--tokenizer-type {kind}: there is no such type; the types are GPT2BPETokenizer, \
                 HuggingFaceTokenizer and NullTokenizer, or use --tokenizer without a type"
            ))),
        }
    }
}

/// The `tokenizer.json` in place of a tokenizer model of another format: the file itself, in the
/// folder, or beside the file.
fn served_by(model: &Path) -> Option<PathBuf> {
    if model.extension().is_some_and(|extension| extension == "json") {
        return Some(model.to_path_buf());
    }
    let folder = if model.is_dir() { model } else { model.parent()? };
    Some(folder.join(TOKENIZER_FILE)).filter(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(
        flags: TokenizerFlags,
        vocab_size: Option<usize>,
    ) -> std::result::Result<ChosenTokenizer, String> {
        flags.choose(vocab_size).map_err(|error| error.to_string())
    }

    #[test]
    fn megatrons_flags_name_the_tokenizers_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(TOKENIZER_FILE), "{}").unwrap();
        let (path, file) =
            (|name: &str| Some(PathBuf::from(name)), Some(folder.path().join("tokenizer.model")));
        let kind = |kind: &str| Some(kind.to_string());
        let json = folder.path().join(TOKENIZER_FILE).display().to_string();
        let base = TokenizerFlags::default;
        // With --vocab-size 50 each.
        let cases: [(TokenizerFlags, &str); 8] = [
            (
                TokenizerFlags { vocab_file: path("v.json"), merge_file: path("m.txt"), ..base() },
                "v.json",
            ),
            (
                TokenizerFlags {
                    vocab_file: path("v.json"),
                    merge_file: path("m.txt"),
                    tokenizer_type: kind("GPT2BPETokenizer"),
                    ..base()
                },
                "v.json",
            ),
            (TokenizerFlags { tokenizer_type: kind("NullTokenizer"), ..base() }, "null:50"),
            (
                TokenizerFlags { tokenizer_model: Some(folder.path().into()), ..base() },
                folder.path().to_str().unwrap(),
            ),
            (
                TokenizerFlags {
                    tokenizer_model: file.clone(),
                    tokenizer_type: kind("Llama2Tokenizer"),
                    ..base()
                },
                &json,
            ),
            (
                TokenizerFlags {
                    tokenizer_model: Some(folder.path().into()),
                    tokenizer_type: kind("GPTSentencePieceTokenizer"),
                    ..base()
                },
                &json,
            ),
            (
                TokenizerFlags { tokenizer: kind("byte"), vocab_file: path("v.json"), ..base() },
                "byte",
            ),
            (
                TokenizerFlags { tokenizer: kind("byte"), split_special_tokens: true, ..base() },
                "byte",
            ),
        ];
        for (flags, name) in cases {
            let merges = flags.merge_file.clone();
            let literal = flags.split_special_tokens;
            let found = chosen(flags, Some(50)).unwrap();
            assert_eq!(found.name.as_deref(), Some(name));
            assert_eq!(
                (found.options.merge_file, found.options.split_special_tokens),
                (merges, literal),
                "{name}"
            );
        }
        assert_eq!(chosen(base(), Some(50)), Ok(ChosenTokenizer::default()));
    }

    #[test]
    fn kinds_that_are_not_there_are_refused_by_name_with_what_to_do() {
        let of = |kind: &str, model: Option<&str>| TokenizerFlags {
            tokenizer_type: Some(kind.into()),
            tokenizer_model: model.map(PathBuf::from),
            ..Default::default()
        };
        let only =
            |name: &str| TokenizerFlags { vocab_file: Some(name.into()), ..Default::default() };
        for (flags, parts) in [
            (
                of("GPTSentencePieceTokenizer", Some("no/such.model")),
                [
                    "GPTSentencePieceTokenizer: files of this type (no/such.model) are not supported",
                    "save_pretrained",
                ],
            ),
            (of("TikTokenizer", None), ["TikTokenizer", "--tokenizer"]),
            (
                of("BertWordPieceCase", None),
                ["BertWordPieceCase is not supported", "tokenizer.json"],
            ),
            (of("MyTokenizer", None), ["MyTokenizer: there is no such type", "GPT2BPETokenizer"]),
            (of("HuggingFaceTokenizer", None), ["HuggingFaceTokenizer needs", "--tokenizer-model"]),
            (
                of("HuggingFaceTokenizer", Some("gpt2")),
                ["--tokenizer-model gpt2", "hf download gpt2"],
            ),
            (of("NullTokenizer", None), ["NullTokenizer", "--vocab-size"]),
            (only("vocab.txt"), ["--vocab-file vocab.txt alone: GPT-2's BPE", "--merge-file"]),
        ] {
            let message = chosen(flags, None).unwrap_err();
            assert!(
                parts.iter().all(|part| message.contains(part)),
                "{message} lacks one of {parts:?}"
            );
        }
    }
}
