//! The size of the vocabulary, on which the cost of the output matrix depends, without the data.

use megatron::checkpoint::{self, Manifest};
use megatron::config::RunConfig;
use megatron::data::Tokenizer;
use megatron::train::saved_run;

use crate::cli::Resolved;
use crate::error::Result;

/// Gives the model its vocabulary, or notes why that is not known.
///
/// # Errors
/// If the checkpoint that the run goes on from cannot be read.
pub fn complete(resolved: &mut Resolved) -> Result<()> {
    let found = match resolved.vocab_size {
        Some(size) => Ok(size),
        None => of_run(&resolved.run)?,
    };
    match found {
        Ok(size) => resolved.run.model.vocab_size = size,
        Err(why) => resolved.notes.push(format!(
            "note: the size of the vocabulary is not known, so the output matrix counts nothing; give --vocab-size ({why})"
        )),
    }
    Ok(())
}

/// The size, or why it is not known.
fn of_run(run: &RunConfig) -> Result<std::result::Result<usize, String>> {
    let data = &run.data;
    let Some(spec) = &data.tokenizer else {
        return match checkpoint::to_load(&run.checkpoint)? {
            Some(path) => Ok(Ok(saved_run(&path, &Manifest::read(&path)?.state)?.model.vocab_size)),
            None => Ok(Err("no tokenizer is given".to_string())),
        };
    };
    // Trained on the data: at most as large as asked for.
    if let Some(Ok(size)) = spec.strip_prefix("train:").map(str::parse) {
        return Ok(Ok(size));
    }
    let opened = Tokenizer::open_with(spec, &data.tokenizer_options, None, &data.cache_dir);
    Ok(opened.map(|tokenizer| tokenizer.vocab_size()).map_err(|error| error.to_string()))
}
