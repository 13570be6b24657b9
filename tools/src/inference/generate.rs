//! `megatron generate`: continues prompts.

use std::io::Write;

use clap::Args;
use megatron::comm::Group;
use megatron::train::{Length, Sampling};

use super::continuation::{Continuation, continued};
use super::{Found, LoadArgs, load, on_ranks};
use crate::error::{Error, Result};

/// Continue prompts with a trained model
///
/// Writes each prompt and its continuation; a single prompt's as it is made. The same seed gives the same text on any layout.
#[derive(Args, Clone, Debug)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:
  megatron generate --load checkpoints/quickstart --prompt 'fn main() {'
  megatron generate --load checkpoints/quickstart --prompt a --prompt b --temperature 0 --tensor-model-parallel-size 2")]
pub struct GenerateArgs {
    #[command(flatten)]
    pub load: LoadArgs,
    /// Text to continue; may be given several times
    #[arg(long, value_name = "TEXT", required = true)]
    pub prompt: Vec<String>,
    /// New tokens for each prompt, at most
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub num_tokens: usize,
    /// 0: always the likeliest token; above 1: more surprising ones
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub temperature: f64,
    /// Draw among this many likeliest tokens; 0: all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub top_k: usize,
    /// Draw among the fewest likeliest tokens whose probabilities sum to this
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f64,
    /// Of the drawing
    #[arg(long, value_name = "N", default_value_t = 1234)]
    pub seed: u64,
}

/// Runs the command and returns the exit code to end with.
///
/// # Errors
/// If the checkpoint, the tokenizer or a prompt cannot be used.
pub fn run(args: &GenerateArgs) -> Result<u8> {
    if !(args.temperature >= 0.0 && args.temperature.is_finite()) {
        return Err(Error::usage(format!("--temperature {} must be 0 or more", args.temperature)));
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        return Err(Error::usage(format!("--top-p {} must be above 0 and at most 1", args.top_p)));
    }
    on_ranks(&args.load, 1, |found, world| generate(args, &found, world))
}

fn generate(args: &GenerateArgs, found: &Found, world: Group) -> Result<()> {
    let tokenizer = args.load.tokenizer(found)?.ok_or_else(|| {
        Error::usage("the checkpoint has no tokenizer beside it; name the one it was trained with: --tokenizer FILE")
    })?;
    if tokenizer.vocab_size() > found.model.vocab_size {
        return Err(Error::usage(format!(
            "tokenizer {} has {} tokens, the model {}; name the tokenizer it was trained with",
            tokenizer.name(),
            tokenizer.vocab_size(),
            found.model.vocab_size
        )));
    }
    let prompts = args.prompt.iter().map(|text| tokenizer.encode(text)).collect::<megatron::Result<Vec<_>>>()?;
    let lead = world.rank() == 0;
    let length = Length { tokens: args.num_tokens, window: found.model.max_position_embeddings, end: tokenizer.eod() };
    // Before weights are loaded, and a prompt printed.
    prompts.iter().try_for_each(|prompt| length.check_prompt(prompt))?;
    let inference = load(found, world)?;
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    if !lead || prompts.len() > 1 {
        let new = inference.stage.generate(&prompts, &length, &sampling, &mut |_, _| {})?;
        for ((text, prompt), new) in args.prompt.iter().zip(&prompts).zip(new).filter(|_| lead) {
            crate::print_line(&format!("{text}{}\n", continued(&tokenizer, prompt, &new)?));
        }
        return Ok(());
    }
    let mut stream = Continuation::of(&tokenizer, &prompts[0])?;
    show(&args.prompt[0]);
    // A token that the tokenizer does not know is an error at the end.
    let mut on_token = |_, token| show(&stream.add(token).unwrap_or_default());
    inference.stage.generate(&prompts, &length, &sampling, &mut on_token)?;
    show(&format!("{}\n", stream.rest()?));
    Ok(())
}

/// Prints a part of a text at once.
fn show(text: &str) {
    let mut out = std::io::stdout();
    // A reader that went away is no reason to fail.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}
