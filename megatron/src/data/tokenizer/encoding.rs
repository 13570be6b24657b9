//! Text → ids, and back.

use std::ops::Range;

use super::{Kind, Tokenizer};
use crate::data::parts::Part;
use crate::data::split_points::SplitPoints;
use crate::{Error, Result};

impl Tokenizer {
    /// The tokens of a text, without any around it.
    ///
    /// # Errors
    /// `Error::Data` if the vocabulary has no tokens for it.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match &self.kind {
            Kind::Byte => Ok(text.bytes().map(u32::from).collect()),
            Kind::Numbers => text.split_ascii_whitespace().map(|word| self.number(word)).collect(),
            Kind::HuggingFace { inner, words, .. } => {
                let of_words =
                    || words.as_ref().map_or(Ok(None), |words| words.encode(inner, text));
                let encode =
                    || inner.encode_fast(text, false).map(|encoding| encoding.get_ids().to_vec());
                of_words()
                    .and_then(|tokens| tokens.map_or_else(encode, Ok))
                    .map_err(|error| self.cannot_encode(&error))
            }
        }
    }

    fn number(&self, word: &str) -> Result<u32> {
        let number = word.parse().ok().filter(|&number| (number as usize) < self.vocab_size);
        number.ok_or_else(|| {
            Error::data(
                &self.name,
                format!(
                    "takes numbers below {} separated by spaces, not {word:?}; give another tokenizer",
                    self.vocab_size
                ),
            )
        })
    }

    fn cannot_encode(&self, error: &tokenizers::Error) -> Error {
        Error::data(&self.name, format!("cannot encode a text: {error}; give another tokenizer"))
    }

    /// The tokens of a text to be continued: those of a document, without the tokens added after
    /// it.
    ///
    /// # Errors
    /// Those of [`encode`](Self::encode).
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        Ok([&self.around[0][..], &self.encode(text)?].concat())
    }

    /// The tokens of a part of a document, in sequences that end with paragraphs. The concatenated
    /// tokens of all parts equal those of one call on the whole document, including the tokens put
    /// around a text.
    ///
    /// # Errors
    /// Those of [`encode`](Self::encode).
    pub fn encode_part(&self, part: &Part) -> Result<Vec<Vec<u32>>> {
        let mut sequences = match part.before {
            _ if !part.ends.is_empty() => self.encode_cut(&part.text, &part.ends)?,
            Some(before) => vec![self.encode_behind(before, &part.text)?],
            None => vec![self.encode(&part.text)?],
        };
        let [before, behind] = &self.around;
        if part.first
            && let Some(first) = sequences.first_mut()
        {
            first.splice(0..0, before.iter().copied());
        }
        if part.last
            && let Some(last) = sequences.last_mut()
        {
            last.extend(behind);
        }
        Ok(sequences)
    }

    /// The tokens of a text in sequences: the first token that starts at or after the end of a
    /// paragraph starts the next sequence.
    fn encode_cut(&self, text: &str, ends: &[usize]) -> Result<Vec<Vec<u32>>> {
        let Kind::HuggingFace { inner, .. } = &self.kind else {
            return Ok(vec![self.encode(text)?]);
        };
        let encoding = inner.encode(text, false).map_err(|error| self.cannot_encode(&error))?;
        let mut sequences = vec![Vec::new()];
        let mut ends = ends.iter().peekable();
        for (&id, &(start, _)) in encoding.get_ids().iter().zip(encoding.get_offsets()) {
            let mut is_next = false;
            while ends.next_if(|end| **end <= start).is_some() {
                is_next = true;
            }
            if is_next {
                sequences.push(Vec::new());
            }
            sequences.last_mut().into_iter().for_each(|sequence| sequence.push(id));
        }
        Ok(sequences)
    }

    /// The tokens of a text after a character that shares no token with it; tokens added before
    /// texts come before that character.
    fn encode_behind(&self, before: char, text: &str) -> Result<Vec<u32>> {
        let (alone, mut all) =
            (self.encode(&before.to_string())?, self.encode(&format!("{before}{text}"))?);
        if !all.starts_with(&alone) {
            return Err(Error::data(
                &self.name,
                format!("joins {before:?} with the text after it; this is a bug, please report it"),
            ));
        }
        Ok(all.split_off(alone.len()))
    }

    /// Whether the tokenizer itself ends a document with the end-of-document token.
    pub fn ends_documents(&self) -> bool {
        self.eod.is_some() && self.around[1].last().copied() == self.eod
    }

    /// Where documents can be cut into parts.
    pub fn split_points(&self) -> SplitPoints {
        match &self.kind {
            Kind::Byte => SplitPoints::anywhere(),
            Kind::Numbers => SplitPoints::behind_spaces(),
            Kind::HuggingFace { inner, .. } => SplitPoints::of(inner),
        }
    }

    /// The ids below `vocab_size` that are not tokens here.
    pub fn absent(&self, vocab_size: usize) -> Vec<Range<usize>> {
        let is_absent = |id: usize| match &self.kind {
            Kind::HuggingFace { inner, .. } => {
                u32::try_from(id).ok().is_none_or(|id| inner.id_to_token(id).is_none())
            }
            Kind::Byte | Kind::Numbers => id >= self.vocab_size,
        };
        let mut ranges: Vec<Range<usize>> = Vec::new();
        for id in (0..vocab_size).filter(|&id| is_absent(id)) {
            match ranges.last_mut().filter(|range| range.end == id) {
                Some(range) => range.end += 1,
                None => ranges.push(id..id + 1),
            }
        }
        ranges
    }

    /// The text of tokens. Special tokens and ids that are not tokens have no text; bytes that are
    /// not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// `Error::Data` if the decoder of the tokenizer fails.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        match &self.kind {
            Kind::Byte => {
                let bytes: Vec<u8> =
                    tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Kind::Numbers => {
                let numbers =
                    tokens.iter().filter(|&&token| Some(token) < self.eod).map(u32::to_string);
                Ok(numbers.collect::<Vec<_>>().join(" "))
            }
            Kind::HuggingFace { inner, .. } => inner.decode(tokens, true).map_err(|error| {
                Error::data(
                    &self.name,
                    format!("cannot decode tokens: {error}; give another tokenizer"),
                )
            }),
        }
    }
}
