//! `megatron generate`: continues prompts.

use std::time::Instant;

use clap::Args;
use megatron::comm::Group;
use megatron::train::{Length, Sampling};

use crate::error::{Error, Result};
use crate::fault::tell;
use crate::inference::continuation::{Continuation, continued, cut_short};
use crate::inference::ends::ends;
use crate::inference::{Found, LoadArgs, load, on_ranks};
use crate::report::{count, duration};

/// Continue prompts with a trained model
///
/// Writes each prompt and its continuation to stdout. With a single prompt, text appears as it is
/// generated. The same seed gives the same text on any layout. The speed is written to stderr.
#[derive(Args, Clone, Debug)]
#[command(allow_negative_numbers = true)]
#[command(after_help = "Examples:
  megatron generate --load checkpoints/quickstart --prompt 'ROMEO:'
  megatron generate --load checkpoints/quickstart --prompt a --prompt b --temperature 0 --tensor-model-parallel-size 2")]
pub struct GenerateArgs {
    #[command(flatten)]
    pub load: LoadArgs,
    /// Text to continue; can be given several times
    #[arg(long, value_name = "TEXT", required = true)]
    pub prompt: Vec<String>,
    /// Most new tokens for each prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub num_tokens: usize,
    /// 0 always takes the likeliest token; values above 1 make unlikely tokens more frequent
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    pub temperature: f64,
    /// Sample among the N likeliest tokens; 0: all
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub top_k: usize,
    /// Sample among the smallest set of likeliest tokens with probabilities that sum to P
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f64,
    /// Seed of the sampling
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
    on_ranks(&args.load, 1, 1, |found, world| generate(args, &found, world))
}

fn generate(args: &GenerateArgs, found: &Found, world: Group) -> Result<()> {
    let tokenizer = args.load.tokenizer(found)?.ok_or_else(|| {
        Error::usage("no tokenizer is beside the checkpoint; give the one it was trained with: --tokenizer FILE")
    })?;
    if tokenizer.vocab_size() > found.model.vocab_size {
        return Err(Error::usage(format!(
            "tokenizer {} has {} tokens, but the model has {}; give the tokenizer it was trained with",
            tokenizer.name(),
            tokenizer.vocab_size(),
            found.model.vocab_size
        )));
    }
    let prompts = args
        .prompt
        .iter()
        .map(|text| tokenizer.encode_prompt(text))
        .collect::<megatron::Result<Vec<_>>>()?;
    let lead = world.rank() == 0;
    tokenizer.notes().iter().filter(|_| lead).for_each(|note| tell(note));
    let length = Length {
        tokens: args.num_tokens,
        window: found.model.max_position_embeddings,
        ends: ends(&tokenizer, Some(&found.folder()?))?,
        absent: tokenizer.absent(found.model.vocab_size),
    };
    // Checks prompts before weights are loaded or a prompt is printed.
    prompts.iter().try_for_each(|prompt| length.check_prompt(prompt))?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let inference = load(found, world, longest.saturating_add(length.tokens).min(length.window))?;
    if lead && args.temperature == 0.0 && (args.top_k > 0 || args.top_p < 1.0) {
        tell(
            "note: --top-k and --top-p have no effect at --temperature 0, which takes the likeliest token",
        );
    }
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    let mut speed = Speed::start(&prompts);
    if !lead || prompts.len() > 1 {
        let new =
            inference.stage.generate(&prompts, &length, &sampling, &mut |_, _| speed.token())?;
        for ((text, prompt), new) in args.prompt.iter().zip(&prompts).zip(new).filter(|_| lead) {
            crate::print_line(&format!("{text}{}\n", continued(&tokenizer, prompt, &new)?));
            cut_short(prompt.len(), new.len(), &length).iter().for_each(|note| tell(note));
        }
        if lead {
            speed.tell();
        }
        return Ok(());
    }
    let mut stream = Continuation::of(&tokenizer, &prompts[0])?;
    crate::print_part(&args.prompt[0]);
    // A failing decoder also fails at the end, where the error is reported.
    let mut on_token = |_, token| {
        speed.token();
        crate::print_part(&stream.add(token).unwrap_or_default());
    };
    let new = inference.stage.generate(&prompts, &length, &sampling, &mut on_token)?;
    crate::print_part(&format!("{}\n", stream.rest()?));
    cut_short(prompts[0].len(), new[0].len(), &length).iter().for_each(|note| tell(note));
    speed.tell();
    Ok(())
}

/// Measures the speed of generation.
struct Speed {
    start: Instant,
    /// Number of prompts, and their tokens.
    prompts: (usize, usize),
    /// Number of new tokens, and the times of the first and the last.
    new: usize,
    came: Option<(Instant, Instant)>,
}

impl Speed {
    fn start(prompts: &[Vec<u32>]) -> Self {
        let prompts = (prompts.len(), prompts.iter().map(Vec::len).sum());
        Self { start: Instant::now(), prompts, new: 0, came: None }
    }

    fn token(&mut self) {
        let now = Instant::now();
        self.new += 1;
        self.came = Some((self.came.map_or(now, |(first, _)| first), now));
    }

    /// Writes the speed to stderr: the time to the first token measures prompts, the rest measures
    /// generation.
    fn tell(&self) {
        let Some((first, last)) = self.came else { return };
        let (prompts, others) = ((first - self.start).as_secs_f64(), (last - first).as_secs_f64());
        let of_prompts = count(self.prompts.1 as u64, "token");
        let mut text = format!("{of_prompts} in prompts read in {}", duration(prompts));
        let new = self.new.saturating_sub(self.prompts.0);
        if new > 0 && others > 0.0 {
            text += &format!(
                ", {new} more in {}: {:.1} a second",
                duration(others),
                new as f64 / others
            );
        }
        tell(&text);
    }
}
