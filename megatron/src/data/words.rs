//! Byte-level BPE word by word, with every word's tokens remembered.
//!
//! A byte-level tokenizer cuts a text into words by a regular expression, and then encodes every word by itself (Radford et al. 2019,
//! GPT-2; the same in Llama 3 and Qwen2). Text repeats its words, so nearly all of them are found in a table, and the model of the
//! `tokenizers` crate is asked for the others only. The tokens are those of the crate's own `encode`, to the last one: whatever is
//! not certain to be is left to it ([`Words::of`], [`Words::encode`]).

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use regex_automata::meta::{Cache, Regex};
use regex_automata::{Input, PatternID};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::{Model, SplitDelimiterBehavior, Tokenizer};
use tokenizers::{ModelWrapper, Result};

/// How GPT-2 cuts text into words.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// How such expressions end: white space, but for the last character of it if a word follows. Only this needs to look ahead.
const SPACES: &str = r"|\s+(?!\S)|\s+";
/// The pattern of white space, beside the rest of the expression.
const IS_SPACE: PatternID = PatternID::new_unchecked(1);
/// Longer words are not remembered, in bytes.
const LONGEST: usize = 128;
/// Words that are remembered by each thread at a time.
const MOST_WORDS: usize = 1 << 17;

/// What cuts text into words, and the words met so far.
#[derive(Debug)]
pub(super) struct Words {
    regex: Regex,
    /// Tokens that are cut out before anything else.
    added: Vec<String>,
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

impl Words {
    /// `None` where a tokenizer does more than to cut text by one expression and to encode the words' bytes.
    pub(super) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let model = bpe(tokenizer)?;
        // Dropout encodes a word differently every time.
        if model.dropout.is_some() || tokenizer.get_normalizer().is_some() {
            return None;
        }
        let pattern = match tokenizer.get_pre_tokenizer()? {
            PreTokenizerWrapper::ByteLevel(bytes) if adds_no_space(bytes) && bytes.use_regex => GPT2,
            PreTokenizerWrapper::Sequence(steps) => match steps.as_ref() {
                [PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(bytes)] => {
                    let cuts = split.behavior == SplitDelimiterBehavior::Isolated && !split.invert;
                    match &split.pattern {
                        SplitPattern::Regex(pattern) if cuts && adds_no_space(bytes) && !bytes.use_regex => pattern,
                        _ => return None,
                    }
                }
                _ => return None,
            },
            _ => return None,
        };
        // Other expressions that look ahead or behind are no regular ones, and are refused here.
        let regex = Regex::new_many(&[pattern.strip_suffix(SPACES)?, r"\s+"]).ok()?;
        let added = tokenizer.get_added_tokens_decoder().into_values();
        let added = added.filter(|token| !token.special && !token.content.is_empty());
        let added = added.map(|token| token.content).collect();
        Some(Self { regex, added, letters: letters(), memories: Mutex::default() })
    }

    /// The tokens of a text; `None` where it must be left to the tokenizer.
    ///
    /// # Errors
    /// Those of the model, where the vocabulary lacks bytes and what stands for them.
    pub(super) fn encode(&self, tokenizer: &Tokenizer, text: &str) -> Result<Option<Vec<u32>>> {
        if self.added.iter().any(|token| text.contains(token)) {
            return Ok(None);
        }
        let Some(model) = bpe(tokenizer) else { return Ok(None) };
        let mut memory = self.memories().pop().unwrap_or_else(|| Memory {
            cache: self.regex.create_cache(),
            words: HashMap::new(),
            tokens: Vec::new(),
        });
        let tokens = self.encode_with(&mut memory, model, text);
        self.memories().push(memory);
        tokens
    }

    fn memories(&self) -> std::sync::MutexGuard<'_, Vec<Memory>> {
        self.memories.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn encode_with(&self, memory: &mut Memory, model: &BPE, text: &str) -> Result<Option<Vec<u32>>> {
        // Three to four bytes a token are usual.
        let mut tokens = Vec::with_capacity(text.len() / 3);
        let mut at = 0;
        while at < text.len() {
            let input = Input::new(text).range(at..);
            let (start, end) = match self.regex.search_with(&mut memory.cache, &input) {
                None => (text.len(), text.len()),
                // An expression that matches nothing would never end.
                Some(found) if found.is_empty() => return Ok(None),
                Some(found) => {
                    let mut end = found.end();
                    if found.pattern() == IS_SPACE && end < text.len() {
                        // A word follows, and takes the last character with it, unless that is the only one.
                        let last = text[found.range()].chars().next_back().map_or(0, char::len_utf8);
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
                    self.encode_word(memory, model, word, &mut tokens)?;
                }
            }
            at = end;
        }
        Ok(Some(tokens))
    }

    fn encode_word(&self, memory: &mut Memory, model: &BPE, word: &str, tokens: &mut Vec<u32>) -> Result<()> {
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
            memory.words.insert(word.into(), (memory.tokens.len() as u32, (tokens.len() - first) as u32));
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
