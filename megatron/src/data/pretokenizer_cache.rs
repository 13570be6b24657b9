//! Byte-level BPE word by word, with a cache of each word's tokens.
//!
//! A byte-level tokenizer splits a text into words with a regular expression, and then encodes each
//! word separately (Radford et al. 2019, GPT-2; the same in Llama 3 and Qwen2). Text repeats its
//! words, so nearly all of them are found in a table, and the model of the `tokenizers` crate
//! encodes only the others. The tokens are exactly those of the crate's own `encode`: cases that
//! are not certain are left to the crate ([`PretokenizerCache::of`],
//! [`PretokenizerCache::encode`]).

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use regex_automata::meta::{Cache, Regex};
use regex_automata::{Input, PatternID};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::{Model, SplitDelimiterBehavior, Tokenizer};
use tokenizers::{AddedToken, ModelWrapper, Result};

use super::added_tokens::{Texts, added_tokens};

/// The expression that splits text into words for GPT-2.
pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// The end of such expressions: white space, without its last character if a word follows. Only
/// this part needs lookahead.
const SPACES: &str = r"|\s+(?!\S)|\s+";
/// The pattern of white space, separate from the rest of the expression.
const IS_SPACE: PatternID = PatternID::new_unchecked(1);
/// Longest word that is cached, in bytes.
const LONGEST: usize = 128;
/// Words that each thread caches at a time.
const MOST_WORDS: usize = 1 << 17;

/// The expression that splits text into words, and the words seen so far.
#[derive(Debug)]
pub(super) struct PretokenizerCache {
    regex: Regex,
    /// Added tokens that are split off first and take no white space with them.
    plain: Texts,
    /// Added tokens that take white space with them, match only between words, or are matched
    /// later.
    others: Texts,
    /// The character for each byte in the vocabulary.
    letters: [char; 256],
    /// As many as the largest number of simultaneous threads so far.
    memories: Mutex<Vec<Memory>>,
}

/// The words that one thread has seen.
#[derive(Debug)]
struct Memory {
    cache: Cache,
    /// Position of a word's tokens in `tokens`: first, and number.
    words: HashMap<Box<str>, (u32, u32)>,
    tokens: Vec<u32>,
}

impl PretokenizerCache {
    /// `None` if a tokenizer does more than split text with one expression and encode the words'
    /// bytes.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let model = bpe(tokenizer)?;
        // With dropout, a word is encoded differently every time.
        if model.dropout.is_some() || tokenizer.get_normalizer().is_some() {
            return None;
        }
        let pattern = match tokenizer.get_pre_tokenizer()? {
            PreTokenizerWrapper::ByteLevel(bytes) if adds_no_space(bytes) && bytes.use_regex => {
                GPT2
            }
            PreTokenizerWrapper::Sequence(steps) => match steps.as_ref() {
                [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(bytes)] => {
                    let cuts = split.behavior == SplitDelimiterBehavior::Isolated && !split.invert;
                    match &split.pattern {
                        SplitPattern::Regex(pattern)
                            if cuts && adds_no_space(bytes) && !bytes.use_regex =>
                        {
                            pattern
                        }
                        _ => return None,
                    }
                }
                _ => return None,
            },
            _ => return None,
        };
        // Other expressions with lookaround are not regular and fail here.
        let regex = Regex::new_many(&[pattern.strip_suffix(SPACES)?, r"\s+"]).ok()?;
        let literal = tokenizer.get_encode_special_tokens();
        let added =
            added_tokens(tokenizer).into_iter().filter(|(_, token)| !(literal && token.special));
        let (plain, others): (Vec<_>, Vec<_>) = added.partition(|(_, token)| {
            !(literal || token.normalized || token.single_word || token.lstrip || token.rstrip)
        });
        let texts = |tokens: Vec<(u32, AddedToken)>| {
            Texts::new(tokens.into_iter().map(|(id, token)| (token.content, id)))
        };
        let (plain, others) = (texts(plain)?, texts(others)?);
        Some(Self { regex, plain, others, letters: letters(), memories: Mutex::default() })
    }

    /// The tokens of a text; `None` if it must be left to the tokenizer.
    ///
    /// # Errors
    /// Those of the model, if the vocabulary lacks bytes and a substitute for them.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Option<Vec<u32>>> {
        if self.others.occur(text) {
            return Ok(None);
        }
        let Some(model) = bpe(tokenizer) else { return Ok(None) };
        let mut memory = self.memories().pop().unwrap_or_else(|| Memory {
            cache: self.regex.create_cache(),
            words: HashMap::new(),
            tokens: Vec::new(),
        });
        // Three to four bytes per token are typical.
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let all = self.encode_between(&mut memory, model, text, &mut tokens);
        self.memories().push(memory);
        Ok(all?.then_some(tokens))
    }

    /// Encodes the text between added tokens, each piece as a separate text.
    fn encode_between(
        &self,
        memory: &mut Memory,
        model: &BPE,
        text: &str,
        tokens: &mut Vec<u32>,
    ) -> Result<bool> {
        let mut at = 0;
        for (found, id) in self.plain.find(text) {
            if !self.encode_with(memory, model, &text[at..found.start], tokens)? {
                return Ok(false);
            }
            tokens.push(id);
            at = found.end;
        }
        self.encode_with(memory, model, &text[at..], tokens)
    }

    fn memories(&self) -> std::sync::MutexGuard<'_, Vec<Memory>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if the text must be left to the tokenizer.
    fn encode_with(
        &self,
        memory: &mut Memory,
        model: &BPE,
        text: &str,
        tokens: &mut Vec<u32>,
    ) -> Result<bool> {
        let mut at = 0;
        while at < text.len() {
            let input = Input::new(text).range(at..);
            let (start, end) = match self.regex.search_with(&mut memory.cache, &input) {
                None => (text.len(), text.len()),
                // An expression that matches an empty string would never advance.
                Some(found) if found.is_empty() => return Ok(false),
                Some(found) => {
                    let mut end = found.end();
                    if found.pattern() == IS_SPACE && end < text.len() {
                        // A word follows and takes the last white-space character, unless it is the
                        // only one.
                        let last =
                            text[found.range()].chars().next_back().map_or(0, char::len_utf8);
                        if found.len() > last {
                            end -= last;
                        }
                    }
                    (found.start(), end)
                }
            };
            // Text that the expression does not match is also a word.
            for word in [&text[at..start], &text[start..end]] {
                if !word.is_empty() {
                    self.encode_word(memory, model, word, tokens)?;
                }
            }
            at = end;
        }
        Ok(true)
    }

    fn encode_word(
        &self,
        memory: &mut Memory,
        model: &BPE,
        word: &str,
        tokens: &mut Vec<u32>,
    ) -> Result<()> {
        if let Some(&(first, count)) = memory.words.get(word) {
            tokens.extend_from_slice(&memory.tokens[first as usize..][..count as usize]);
            return Ok(());
        }
        let letters: String = word.bytes().map(|byte| self.letters[usize::from(byte)]).collect();
        let first = tokens.len();
        tokens.extend(model.tokenize(&letters)?.into_iter().map(|token| token.id));
        if word.len() <= LONGEST {
            if memory.words.len() == MOST_WORDS {
                memory.words.clear();
                memory.tokens.clear();
            }
            // A word has at most as many tokens as letters, so these numbers are far below 2^32.
            memory
                .words
                .insert(word.into(), (memory.tokens.len() as u32, (tokens.len() - first) as u32));
            memory.tokens.extend_from_slice(&tokens[first..]);
        }
        Ok(())
    }
}

fn bpe(tokenizer: &Tokenizer) -> Option<&BPE> {
    match tokenizer.get_model() {
        ModelWrapper::BPE(model) => Some(model),
        _ => None,
    }
}

fn adds_no_space(bytes: &ByteLevel) -> bool {
    !bytes.add_prefix_space
}

/// Bytes without a visible character are mapped to characters from U+0100 on (GPT-2's
/// `bytes_to_unicode`).
fn letters() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte as u8 {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => byte as u8 as char,
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
    })
}
