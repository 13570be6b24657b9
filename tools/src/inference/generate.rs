//! `megatron generate`: continues prompts.

use std::io::Write;

use clap::Args;
use megatron::comm::Group;
use megatron::data::Tokenizer;
use megatron::train::{Length, Sampling};

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
    let inference = load(found, world)?;
    let length = Length { tokens: args.num_tokens, window: found.model.max_position_embeddings, end: tokenizer.eod() };
    let sampling = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    let mut stream = Stream::new(&tokenizer, lead && prompts.len() == 1);
    stream.text(&args.prompt[0]);
    let new = inference.stage.generate(&prompts, &length, &sampling, &mut |_, token| stream.token(token))?;
    stream.end();
    if lead && prompts.len() > 1 {
        for (prompt, tokens) in args.prompt.iter().zip(new) {
            crate::print_line(&format!("{prompt}{}\n", tokenizer.decode(&tokens)?));
        }
    }
    Ok(())
}

/// Prints text as its tokens come: what is decoded so far, less what may still change (a character whose bytes are not all there).
struct Stream<'a> {
    tokenizer: &'a Tokenizer,
    shown: bool,
    tokens: Vec<u32>,
    printed: usize,
}

impl<'a> Stream<'a> {
    fn new(tokenizer: &'a Tokenizer, shown: bool) -> Self {
        Self { tokenizer, shown, tokens: Vec::new(), printed: 0 }
    }

    fn text(&self, text: &str) {
        if self.shown {
            let mut out = std::io::stdout();
            // A reader that went away is no reason to fail.
            let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
        }
    }

    fn token(&mut self, token: u32) {
        self.tokens.push(token);
        let decoded = self.tokenizer.decode(&self.tokens).unwrap_or_default();
        if let Some(new) = decoded.get(self.printed..).filter(|_| !decoded.ends_with('\u{FFFD}')) {
            self.text(new);
            self.printed = decoded.len();
        }
    }

    fn end(&self) {
        let decoded = self.tokenizer.decode(&self.tokens).unwrap_or_default();
        self.text(decoded.get(self.printed..).unwrap_or_default());
        self.text("\n");
    }
}
