//! Added tokens: texts that are single tokens wherever they occur, and are split off before any
//! other processing.

use std::ops::Range;

use regex_automata::meta::Regex;
use tokenizers::{AddedToken, Tokenizer};

/// A set of texts that are searched for at once.
#[derive(Clone, Debug, Default)]
pub(super) struct Texts {
    /// `None`: the set is empty.
    regex: Option<Regex>,
    /// Bytes of the longest text.
    longest: usize,
    /// The number for each text, such as a token id.
    ids: Vec<u32>,
}

impl Texts {
    /// `None` if there are too many for one regular expression.
    pub fn new(texts: impl IntoIterator<Item = (String, u32)>) -> Option<Self> {
        let mut texts: Vec<(String, u32)> =
            texts.into_iter().filter(|(text, _)| !text.is_empty()).collect();
        // If several alternatives match at the same place, a regular expression takes the first.
        texts.sort_by(|(a, _), (b, _)| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
        let escaped = |text: &str| {
            text.chars().map(|c| format!("\\x{{{:X}}}", u32::from(c))).collect::<String>()
        };
        let patterns: Vec<String> = texts.iter().map(|(text, _)| escaped(text)).collect();
        let regex = match patterns.is_empty() {
            true => None,
            false => Some(Regex::new_many(&patterns).ok()?),
        };
        let longest = texts.first().map_or(0, |(text, _)| text.len());
        Some(Self { regex, longest, ids: texts.into_iter().map(|(_, id)| id).collect() })
    }

    /// Bytes of the longest text.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// Whether one of the texts occurs in `text`.
    pub fn occur(&self, text: &str) -> bool {
        self.regex.as_ref().is_some_and(|regex| regex.is_match(text))
    }

    /// Their occurrences in `text`, leftmost and longest first, with the number for each.
    pub fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (Range<usize>, u32)> + 'a {
        let found = self.regex.as_ref().map(|regex| regex.find_iter(text));
        found
            .into_iter()
            .flatten()
            .map(|found| (found.range(), self.ids[found.pattern().as_usize()]))
    }
}

/// The added tokens of a tokenizer with their ids, in the order of the ids.
pub(super) fn added_tokens(tokenizer: &Tokenizer) -> Vec<(u32, AddedToken)> {
    let mut tokens: Vec<(u32, AddedToken)> =
        tokenizer.get_added_tokens_decoder().into_iter().collect();
    tokens.sort_by_key(|(id, _)| *id);
    tokens
}
