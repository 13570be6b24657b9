//! The shapes that this program and `tools/bench/torch_gpt.py` measure.

use clap::{Command, FromArgMatches, ValueEnum};
use megatron::config::{ModelConfig, PositionEmbedding};

use crate::cli::flags::{self, Flags};
use crate::error::{Error, Result};

/// A model and its microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preset {
    /// GPT-2 style: 6 layers, 384 wide, 256 tokens × 8 samples, 8192 in the vocabulary
    Small,
    /// Llama style: as small, with 2 key/value heads, RMSNorm, rotary positions and SwiGLU
    LlamaSmall,
    /// GPT-2 itself: 12 layers, 768 wide, 512 tokens × 2 samples, 50304 in the vocabulary
    #[value(name = "gpt2-124m")]
    Gpt2,
    /// GPT-2 itself with a GPU's batch: 1024 tokens × 32 samples
    #[value(name = "gpt2-124m-gpu")]
    Gpt2Gpu,
    /// A Llama of a billion parameters: 16 layers, 2048 wide, 8 key/value heads, 4096 tokens × 4
    /// samples, 32768 in the vocabulary
    #[value(name = "llama-1b-gpu")]
    Llama1bGpu,
}

/// The numbers of a preset. The output matrix is the token embedding in all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub groups: usize,
    pub ffn: usize,
    pub seq: usize,
    pub micro_batch: usize,
    pub vocab: usize,
    pub llama: bool,
}

impl Preset {
    /// The preset's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::LlamaSmall => "llama-small",
            Self::Gpt2 => "gpt2-124m",
            Self::Gpt2Gpu => "gpt2-124m-gpu",
            Self::Llama1bGpu => "llama-1b-gpu",
        }
    }

    pub fn shape(self) -> Shape {
        let small = Shape {
            layers: 6,
            hidden: 384,
            heads: 6,
            groups: 6,
            ffn: 1536,
            seq: 256,
            micro_batch: 8,
            vocab: 8192,
            llama: false,
        };
        let gpt2 = Shape {
            layers: 12,
            hidden: 768,
            heads: 12,
            groups: 12,
            ffn: 3072,
            seq: 512,
            micro_batch: 2,
            vocab: 50304,
            llama: false,
        };
        match self {
            Self::Small => small,
            Self::LlamaSmall => Shape { groups: 2, ffn: 1024, llama: true, ..small },
            Self::Gpt2 => gpt2,
            Self::Gpt2Gpu => Shape { seq: 1024, micro_batch: 32, ..gpt2 },
            Self::Llama1bGpu => Shape {
                layers: 16,
                hidden: 2048,
                heads: 32,
                groups: 8,
                ffn: 8192,
                seq: 4096,
                micro_batch: 4,
                vocab: 32768,
                llama: true,
            },
        }
    }

    /// The settings of a `pretrain` run with this shape, equal to those of the PyTorch script: no
    /// dropout, AdamW at 3e-4 with weight decay 0.01, gradients clipped at norm 1.
    ///
    /// # Errors
    /// If a setting of `pretrain` has changed its name.
    pub fn flags(self, steps: u64) -> Result<Flags> {
        let s = self.shape();
        let sizes = [
            ("num-layers", s.layers),
            ("hidden-size", s.hidden),
            ("num-attention-heads", s.heads),
            ("num-query-groups", s.groups),
            ("ffn-hidden-size", s.ffn),
            ("seq-length", s.seq),
            ("vocab-size", s.vocab),
            ("micro-batch-size", s.micro_batch),
        ];
        let mut words: Vec<String> =
            sizes.iter().map(|(flag, size)| format!("--{flag}={size}")).collect();
        words.push(format!("--train-iters={steps}"));
        let common = [
            "attention-dropout=0",
            "hidden-dropout=0",
            "lr=3e-4",
            "lr-decay-style=constant",
            "data-path=random",
        ];
        let llama = [
            "position-embedding-type=rope",
            "normalization=RMSNorm",
            "swiglu=true",
            "disable-bias-linear=true",
        ];
        let style = if s.llama { &llama[..] } else { &[] };
        words.extend(common.iter().chain(style).map(|setting| format!("--{setting}")));
        let command =
            <Flags as clap::Args>::augment_args(Command::new("preset").no_binary_name(true));
        command
            .mut_args(flags::with_switches)
            .try_get_matches_from(words)
            .and_then(|matches| Flags::from_arg_matches(&matches))
            .map_err(|error| {
                Error::Launch(format!(
                    "the preset {} does not fit `pretrain`: {error}",
                    self.name()
                ))
            })
    }
}

/// N: the parameters that take part in products with a token. Position embeddings are looked up and
/// do not count; a tied matrix counts once.
pub fn matrix_params(model: &ModelConfig) -> u64 {
    let positions = match model.position_embedding {
        PositionEmbedding::LearnedAbsolute => {
            (model.max_position_embeddings * model.hidden_size) as u64
        }
        PositionEmbedding::Rope | PositionEmbedding::Alibi | PositionEmbedding::None => 0,
    };
    model.num_params() - positions
}

/// 6·N + 6·L·H·S: operations of one token, forward and backward, with the causal half of attention.
/// `pretrain` counts slightly differently, as Megatron does. This formula is that of the PyTorch
/// script, so that results can be compared.
pub fn flops_per_token(model: &ModelConfig) -> f64 {
    let attention = 6 * model.num_layers * model.hidden_size * model.seq_length;
    6.0 * matrix_params(model) as f64 + attention as f64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::cli::{Gathered, resolve};

    fn model(preset: Preset) -> ModelConfig {
        let gathered = Gathered::of(preset.flags(1).unwrap(), BTreeMap::new());
        let resolved = resolve(&gathered, None).unwrap();
        ModelConfig { vocab_size: resolved.vocab_size.unwrap(), ..resolved.run.model }
    }

    #[test]
    fn presets_have_the_parameters_that_the_peer_script_counts() {
        let counted = Preset::value_variants().iter().map(|preset| matrix_params(&model(*preset)));
        // `num_params` of tools/bench/torch_gpt.py.
        assert_eq!(
            counted.collect::<Vec<_>>(),
            [13_793_280, 12_587_904, 123_689_472, 123_689_472, 1_040_254_976]
        );
    }

    #[test]
    fn a_token_costs_two_operations_per_parameter_and_pass_and_half_of_the_attention_square() {
        let model = model(Preset::Small);
        // passes, operations, products, layers, width, keys / 2
        let attention = 3.0 * 2.0 * 2.0 * 6.0 * 384.0 * 256.0 / 2.0;
        assert_eq!(flops_per_token(&model), 6.0 * matrix_params(&model) as f64 + attention);
    }
}
