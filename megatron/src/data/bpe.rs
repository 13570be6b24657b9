//! Training of a byte-level BPE vocabulary on a corpus.
//!
//! Sennrich et al. 2016 on bytes (Radford et al. 2019), by the trainer of the `tokenizers` crate.

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};
use tokenizers::{decoders::DecoderWrapper, normalizers::NormalizerWrapper, processors::PostProcessorWrapper};

use super::tokenizer::END_OF_TEXT;
use crate::{Error, Result};

/// Of vocabularies to train; the largest in use have a quarter of a million tokens.
const LARGEST_VOCABULARY: usize = 1 << 24;
/// Pairs seen less often than this are not merged.
const MIN_FREQUENCY: u64 = 2;

/// Trains a vocabulary of at most `vocab_size` tokens on `texts`, which are read one at a time; gives its `tokenizer.json`.
pub(super) fn train_bpe(vocab_size: usize, texts: impl Iterator<Item = Result<String>> + Send) -> Result<String> {
    // The trainer asks for memory for all of them at once.
    if vocab_size > LARGEST_VOCABULARY {
        return Err(Error::config(format!(
            "a vocabulary of {vocab_size} tokens is larger than any that is trained here; give {LARGEST_VOCABULARY} at most"
        )));
    }
    let failed = |error: tokenizers::Error| {
        Error::config(format!("training a tokenizer of {vocab_size} tokens failed: {error}"))
    };
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer =
        TokenizerBuilder::<BPE, NormalizerWrapper, ByteLevel, PostProcessorWrapper, DecoderWrapper>::new()
            .with_model(BPE::default())
            .with_pre_tokenizer(Some(byte_level))
            .with_decoder(Some(byte_level.into()))
            .build()
            .map_err(failed)?;
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocab_size)
        .min_frequency(MIN_FREQUENCY)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build();
    let mut unreadable = None;
    let mut is_empty = true;
    let texts = texts.map_while(|text| match text {
        Ok(text) => {
            is_empty &= text.is_empty();
            Some(text)
        }
        Err(error) => {
            unreadable = Some(error);
            None
        }
    });
    tokenizer.train(&mut trainer, texts).map_err(failed)?;
    match unreadable {
        Some(error) => Err(error),
        None if is_empty => {
            Err(Error::config("there is no text to train a vocabulary on; give files that are not empty"))
        }
        None => tokenizer.to_string(false).map_err(failed),
    }
}
