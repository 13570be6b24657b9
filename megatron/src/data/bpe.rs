//! Training of a byte-level BPE vocabulary on a corpus.
//!
//! Sennrich et al. 2016 on bytes (Radford et al. 2019), with the trainer of the `tokenizers` crate.

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, TokenizerBuilder};
use tokenizers::{
    decoders::DecoderWrapper, normalizers::NormalizerWrapper, processors::PostProcessorWrapper,
};

use super::tokenizer::END_OF_TEXT;
use crate::{Error, Result};

/// Limit of trained vocabularies; the largest in use have a quarter of a million tokens.
const LARGEST_VOCABULARY: usize = 1 << 24;
/// Pairs seen less often than this are not merged.
const MIN_FREQUENCY: u64 = 2;

/// Longest word for the trainer, in characters: its time grows with the square of a word's length.
const LONGEST_WORD: usize = 1024;

/// Splits `text` so that no word is longer. GPT-2's pattern ends words where letters, digits,
/// spaces and other characters meet.
fn without_long_words(text: String) -> Vec<String> {
    if text.len() <= LONGEST_WORD {
        return vec![text];
    }
    let kind = |c: char| match c {
        _ if c.is_alphabetic() => 0,
        _ if c.is_numeric() => 1,
        _ if c.is_whitespace() => 2,
        _ => 3,
    };
    let (mut cuts, mut length, mut last) = (vec![0], 0, None);
    for (at, c) in text.char_indices() {
        length = if last == Some(kind(c)) { length + 1 } else { 1 };
        last = Some(kind(c));
        if length > LONGEST_WORD {
            cuts.push(at);
            length = 1;
        }
    }
    if cuts.len() == 1 {
        return vec![text];
    }
    cuts.push(text.len());
    cuts.windows(2).map(|piece| text[piece[0]..piece[1]].to_string()).collect()
}

/// Trains a vocabulary of at most `vocab_size` tokens on `texts`, which are read one at a time;
/// returns its `tokenizer.json`.
pub(super) fn train_bpe(
    vocab_size: usize,
    texts: impl Iterator<Item = Result<String>> + Send,
) -> Result<String> {
    // The trainer allocates memory for all tokens at once.
    if vocab_size > LARGEST_VOCABULARY {
        return Err(Error::config(format!(
            "a vocabulary of {vocab_size} tokens is too large to train; give at most {LARGEST_VOCABULARY}"
        )));
    }
    let failed = |error: tokenizers::Error| {
        Error::config(format!("training a tokenizer of {vocab_size} tokens failed: {error}"))
    };
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = TokenizerBuilder::<
        BPE,
        NormalizerWrapper,
        ByteLevel,
        PostProcessorWrapper,
        DecoderWrapper,
    >::new()
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
            Some(without_long_words(text))
        }
        Err(error) => {
            unreadable = Some(error);
            None
        }
    });
    let texts = texts.flatten();
    tokenizer.train(&mut trainer, texts).map_err(failed)?;
    match unreadable {
        Some(error) => Err(error),
        None if is_empty => {
            Err(Error::config("there is no text to train a vocabulary on; give files with text"))
        }
        None => tokenizer.to_string(false).map_err(failed),
    }
}

#[cfg(test)]
mod tests {
    use super::{LONGEST_WORD, train_bpe, without_long_words};

    #[test]
    fn only_words_that_are_too_long_are_cut() {
        let usual = "PretokenizerCache, 12345 of them.  ".repeat(LONGEST_WORD);
        assert_eq!(without_long_words(usual.clone()), [usual]);
        let long = "é".repeat(2 * LONGEST_WORD + 3);
        let pieces = without_long_words(format!("before {long} behind"));
        assert_eq!(pieces.concat(), format!("before {long} behind"));
        let lengths: Vec<usize> = pieces.iter().map(|piece| piece.chars().count()).collect();
        assert_eq!(lengths, ["before ".len() + LONGEST_WORD, LONGEST_WORD, 3 + " behind".len()]);
    }

    /// With quadratic time, this text took minutes.
    #[test]
    fn one_word_of_a_megabyte_trains_a_vocabulary() {
        let word: String = (0..1_u32 << 20)
            .map(|i| char::from(b'a' + (i.wrapping_mul(2654435761) >> 29) as u8))
            .collect();
        let json = train_bpe(300, std::iter::once(Ok(word))).unwrap();
        assert!(json.contains("\"merges\""));
    }
}
