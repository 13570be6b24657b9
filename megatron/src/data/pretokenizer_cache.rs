//! Byte-level BPE word by word, with every word's tokens remembered.
//!
//! A byte-level tokenizer cuts a text into words by a regular expression, and then encodes every
//! word by itself (Radford et al. 2019, GPT-2; the same in Llama 3 and Qwen2). Text repeats its
//! words, so nearly all of them are found in a table, and the model of the `tokenizers` crate is
//! asked for the others only. The tokens are those of the crate's own `encode`, to the last one:
//! whatever is not certain to be is left to it ([`PretokenizerCache::of`],
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

/// How GPT-2 cuts text into words.
pub(super) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// How such expressions end: white space, but for the last character of it if a word follows. Only
/// this needs to look ahead.
const SPACES: &str = r"|\s+(?!\S)|\s+";
/// The pattern of white space, beside the rest of the expression.
const IS_SPACE: PatternID = PatternID::new_unchecked(1);
/// Longer words are not remembered, in bytes.
const LONGEST: usize = 128;
/// Words that are remembered by each thread at a time.
const MOST_WORDS: usize = 1 << 17;

/// What cuts text into words, and the words met so far.
#[derive(Debug)]
pub(super) struct PretokenizerCache {
    regex: Regex,
    /// Tokens that are cut out before anything else, and nothing with them.
    plain: Texts,
    /// Those that take white space along, stand between words alone, or are looked for later.
    others: Texts,
    /// The character that stands for a byte in the vocabulary.
    letters: [char; 256],
    /// As many as there were ever threads at the same time.
    memories: Mutex<Vec<Memory>>,
}

/// The words that one thread has met.
#[derive(Debug)]
struct Memory {
    cache: Cache,
    /// Where in `tokens` a word's are: first, and how many.
    words: HashMap<Box<str>, (u32, u32)>,
    tokens: Vec<u32>,
}

impl PretokenizerCache {
    /// `None` where a tokenizer does more than to cut text by one expression and to encode the
    /// words' bytes.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let model = bpe(tokenizer)?;
        // Dropout encodes a word differently every time.
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
        // Other expressions that look ahead or behind are no regular ones, and are refused here.
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

    /// The tokens of a text; `None` where it must be left to the tokenizer.
    ///
    /// # Errors
    /// Those of the model, where the vocabulary lacks bytes and what stands for them.
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
        // Three to four bytes a token are usual.
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let all = self.encode_between(&mut memory, model, text, &mut tokens);
        self.memories().push(memory);
        Ok(all?.then_some(tokens))
    }

    /// Encodes what lies between added tokens, each as if it were a text.
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

    /// False where that must be left to the tokenizer.
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
                // An expression that matches nothing would never end.
                Some(found) if found.is_empty() => return Ok(false),
                Some(found) => {
                    let mut end = found.end();
                    if found.pattern() == IS_SPACE && end < text.len() {
                        // A word follows, and takes the last character with it, unless that is the
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
            // What the expression leaves out is a word, too.
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
            // A word has no more tokens than letters, so these are far from 2^32.
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

/// Bytes that are no visible character have stand-ins from U+0100 on (GPT-2's `bytes_to_unicode`).
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
