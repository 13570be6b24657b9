//! Finds where the text of a document can be cut so that the concatenated tokens of the parts equal
//! those of the whole.
//!
//! The ids of a document are those of one call of its tokenizer on the whole text. A long document
//! is tokenized in parts where that changes nothing. The components of the tokenizer decide where;
//! a place that is not known to be safe is never cut.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer};

use super::added_tokens::{Texts, added_tokens};
use super::pretokenizer_cache::GPT2;

/// Longest white space examined around a cut, in bytes; longer white space prevents the cut.
const LONGEST_RUN: usize = 256;
/// Bytes examined after a cut, besides the longest added token.
const AHEAD: usize = 2 * LONGEST_RUN;

/// Where text can be cut.
#[derive(Clone, Debug)]
pub struct SplitPoints {
    rule: Rule,
    /// Added tokens, which are split off first, as they appear in a text. Nothing is cut near them,
    /// because they affect the text next to them.
    added: Texts,
}

#[derive(Clone, Debug)]
enum Rule {
    Anywhere,
    Never,
    /// GPT-2's expression: words include one space before them and no other white space.
    Gpt2 {
        prefix: bool,
        digits: bool,
    },
    /// Llama 3's, Qwen's and GPT-4's expressions: white space ends with its last line break, and
    /// punctuation includes the line breaks after it; in GPT-4o's also slashes.
    Lines {
        slashes: bool,
    },
    /// White space separates words and is dropped.
    Space,
    /// Spaces are characters of the vocabulary.
    Characters(Characters),
}

/// A tokenizer without words, or with words that start with a space (sentencepiece's).
#[derive(Clone, Debug)]
struct Characters {
    /// The character for a space.
    space: char,
    /// Words start with it, and are encoded separately.
    words: bool,
    pairs: Option<Pairs>,
}

/// The characters in tokens.
#[derive(Clone, Debug)]
struct Pairs {
    /// Pairs that are adjacent in a token: no other pair is ever merged.
    adjacent: HashSet<(char, char)>,
    /// Characters that are tokens; `None`: other characters become byte tokens. Unknown characters
    /// may be dropped, or form one token with their neighbours.
    known: Option<HashSet<char>>,
}

impl SplitPoints {
    /// Anywhere, for tokens that are bytes.
    pub fn anywhere() -> Self {
        Self::without_added(Rule::Anywhere)
    }

    /// Between words as GPT-2 splits them.
    pub fn between_words() -> Self {
        Self::without_added(Rule::Gpt2 { prefix: false, digits: false })
    }

    /// After white space, which is dropped.
    pub(super) fn behind_spaces() -> Self {
        Self::without_added(Rule::Space)
    }

    fn without_added(rule: Rule) -> Self {
        Self { rule, added: Texts::default() }
    }

    /// The split points of a tokenizer.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let found = Rule::of(tokenizer).zip(texts_of_added(tokenizer));
        found.map_or_else(|| Self::without_added(Rule::Never), |(rule, added)| Self { rule, added })
    }

    /// Nothing is ever cut.
    pub fn never(&self) -> bool {
        matches!(self.rule, Rule::Never)
    }

    /// Whether the first tokens of a part depend on text before it.
    pub(super) fn overlap(&self) -> bool {
        matches!(self.rule, Rule::Characters(_) | Rule::Gpt2 { prefix: true, .. })
    }

    /// Bytes examined after a cut.
    pub(super) fn ahead(&self) -> usize {
        if matches!(self.rule, Rule::Anywhere) { 1 } else { AHEAD + self.added.longest() }
    }

    /// Whether `text`, which starts at the start of a document or at a cut, can be cut at byte
    /// `at`; `whole`: it ends with the document.
    pub fn allow(&self, text: &str, at: usize, whole: bool) -> bool {
        let (before, behind) = text.split_at(at);
        let (Some(a), Some(b)) = (before.chars().next_back(), behind.chars().next()) else {
            return false;
        };
        let allowed = match &self.rule {
            Rule::Anywhere => return true,
            Rule::Never => false,
            Rule::Gpt2 { prefix, digits } => {
                between_words(before, (a, b), behind, *prefix, *digits)
            }
            Rule::Lines { slashes } => between_lines((a, b), behind, *slashes),
            Rule::Space => matches!(a, ' ' | '\n' | '\t' | '\r'),
            Rule::Characters(characters) => characters.allow(a, b),
        };
        allowed && !self.is_near_added(before, behind, whole)
    }

    /// Whether an added token may touch the white space around a cut.
    fn is_near_added(&self, before: &str, behind: &str, whole: bool) -> bool {
        let longest = self.added.longest();
        if longest == 0 {
            return false;
        }
        let (spaces_before, spaces_behind) =
            (before.len() - before.trim_end().len(), behind.len() - behind.trim_start().len());
        if spaces_before.max(spaces_behind) > LONGEST_RUN {
            return true;
        }
        let needed = spaces_behind + longest;
        if behind.len() < needed && !whole {
            return true;
        }
        let start =
            before.floor_char_boundary(before.len().saturating_sub(spaces_before + longest));
        let end = behind.ceil_char_boundary(needed.min(behind.len()));
        self.added.occur(&[&before[start..], &behind[..end]].concat())
    }
}

/// The white space at the start of a text; `None` if it may continue after the available text, or
/// is too long to examine.
fn spaces(text: &str) -> Option<&str> {
    let mut characters = text.char_indices().take_while(|(at, _)| *at <= LONGEST_RUN);
    let end = characters.find(|(_, c)| !c.is_whitespace());
    end.map(|(at, _)| &text[..at])
}

/// Words are ` ?letters`, ` ?digits`, ` ?signs` and `\s+(?!\S)|\s+`: white space without its last
/// character. A word includes that last character if it is a space; otherwise the character is a
/// separate word. So words end before white space, before the last of several white-space
/// characters, and after a single one that is not a space. If digits are split off first, the text
/// before them counts as the end of a text.
fn between_words(
    before: &str,
    (a, b): (char, char),
    behind: &str,
    prefix: bool,
    digits: bool,
) -> bool {
    if !a.is_whitespace() {
        return b.is_whitespace();
    }
    if b.is_whitespace() {
        let last = &behind[b.len_utf8()..];
        return last
            .chars()
            .next()
            .is_some_and(|c| !(c.is_whitespace() || digits && c.is_numeric()));
    }
    // A space that is added before a part would make it two.
    let is_single = before.chars().nth_back(1).is_none_or(|c| !c.is_whitespace());
    !prefix && a != ' ' && is_single
}

/// `\s*[\r\n]+` matches white space up to its last line break, before white space without one is
/// tried. Nothing else contains a line break, except signs, which include line breaks that follow
/// them. Other white space belongs to the text after it.
fn between_lines((a, b): (char, char), behind: &str, slashes: bool) -> bool {
    let is_end = |c: char| matches!(c, '\n' | '\r');
    if a == '\n' {
        return !(slashes && b == '/') && spaces(behind).is_some_and(|run| !run.contains(is_end));
    }
    !a.is_whitespace() && b.is_whitespace() && !is_end(b)
}

impl Characters {
    fn allow(&self, a: char, b: char) -> bool {
        let [a, b] = [a, b].map(|c| if c == ' ' { self.space } else { c });
        if self.words && b == self.space {
            return true;
        }
        self.pairs.as_ref().is_some_and(|pairs| {
            let known = |c: &char| pairs.known.as_ref().is_none_or(|known| known.contains(c));
            known(&a) && known(&b) && !pairs.adjacent.contains(&(a, b))
        })
    }
}

impl Pairs {
    /// The pairs of a BPE model. `None` if tokens form in other ways than by merging adjacent parts
    /// of a text.
    fn of(model: &ModelWrapper) -> Option<Self> {
        let ModelWrapper::BPE(bpe) = model else { return None };
        let is_empty = |affix: &Option<String>| affix.as_ref().is_none_or(String::is_empty);
        // A whole text that is a token would become one without merges.
        if bpe.ignore_merges
            || !is_empty(&bpe.continuing_subword_prefix)
            || !is_empty(&bpe.end_of_word_suffix)
        {
            return None;
        }
        let vocab = bpe.get_vocab();
        let byte = |byte: u32| format!("<0x{byte:02X}>");
        let has_bytes = bpe.byte_fallback && (0..256).all(|n| vocab.contains_key(&byte(n)));
        if bpe.byte_fallback && !has_bytes {
            return None;
        }
        let names: Vec<String> =
            bpe.unk_token.iter().cloned().chain((0..256).filter(|_| has_bytes).map(byte)).collect();
        let names = Texts::new(names.into_iter().map(|name| (name, 0)))?;
        let mut pairs = Self { adjacent: HashSet::new(), known: (!has_bytes).then(HashSet::new) };
        for token in vocab.keys() {
            let mut characters = token.chars();
            let Some(mut last) = characters.next() else { continue };
            if characters.as_str().is_empty()
                && let Some(known) = &mut pairs.known
            {
                known.insert(last);
            }
            // A token that a byte or an unknown token would be merged into.
            if names.find(token).any(|(found, _)| found.len() < token.len()) {
                return None;
            }
            for c in characters {
                pairs.adjacent.insert((last, c));
                last = c;
            }
        }
        Some(pairs)
    }
}

impl Rule {
    /// `None`: unknown.
    fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let model = tokenizer.get_model();
        if matches!(model, ModelWrapper::BPE(bpe) if bpe.dropout.is_some()) {
            return None;
        }
        let normalizers = steps(tokenizer.get_normalizer())?;
        let pre_tokenizers = steps(tokenizer.get_pre_tokenizer())?;
        let only = |kinds: &[&str]| normalizers.iter().all(|step| kinds.contains(&kind(step)));
        let kinds: Vec<&str> = pre_tokenizers.iter().map(kind).collect();
        let is = |step: usize, key: &str| pre_tokenizers[step][key] == true;
        match kinds.as_slice() {
            // NFC neither creates nor changes white space, and joins nothing to it.
            ["ByteLevel"] if is(0, "use_regex") && only(&["NFC"]) => {
                Some(Self::Gpt2 { prefix: is(0, "add_prefix_space"), digits: false })
            }
            ["Digits", "ByteLevel"]
                if is(1, "use_regex") && !is(1, "add_prefix_space") && only(&["NFC"]) =>
            {
                Some(Self::Gpt2 { prefix: false, digits: true })
            }
            ["Split", "ByteLevel"]
                if !is(1, "use_regex") && !is(1, "add_prefix_space") && only(&["NFC"]) =>
            {
                let split = &pre_tokenizers[0];
                let isolates = split["behavior"] == "Isolated" && split["invert"] == false;
                split["pattern"]["Regex"]
                    .as_str()
                    .filter(|_| isolates)
                    .and_then(Self::of_expression)
            }
            ["BertPreTokenizer" | "Whitespace" | "WhitespaceSplit", rest @ ..]
                if rest.iter().all(|kind| ["Punctuation", "Digits"].contains(kind))
                    && only(&[
                        "BertNormalizer",
                        "Lowercase",
                        "StripAccents",
                        "NFC",
                        "NFD",
                        "NFKC",
                        "NFKD",
                    ]) =>
            {
                Some(Self::Space)
            }
            ["Metaspace"] if normalizers.is_empty() => {
                let space = pre_tokenizers[0]["replacement"].as_str().and_then(one_character)?;
                Self::of_characters(Characters {
                    space,
                    words: is(0, "split"),
                    pairs: Pairs::of(model),
                })
            }
            [] => {
                let space = space_of(&normalizers)?;
                Self::of_characters(Characters { space, words: false, pairs: Pairs::of(model) })
            }
            _ => None,
        }
    }

    fn of_characters(characters: Characters) -> Option<Self> {
        (characters.words || characters.pairs.is_some()).then_some(Self::Characters(characters))
    }

    fn of_expression(pattern: &str) -> Option<Self> {
        const CONTRACTIONS: &str = "(?i:'s|'t|'re|'ve|'m|'ll|'d)";
        const SPACES: &str = r"|\s*[\r\n]+|\s+(?!\S)|\s+";
        let words = |digits: &str| {
            format!(
                r"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{SPACES}"
            )
        };
        let (upper, lower) = (r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]");
        let sign = r"[^\r\n\p{L}\p{N}]?";
        let gpt4o = format!(
            r"{sign}{upper}*{lower}+{CONTRACTIONS}?|{sign}{upper}+{lower}*{CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{SPACES}"
        );
        match pattern {
            GPT2 => Some(Self::Gpt2 { prefix: false, digits: false }),
            _ if [r"\p{N}{1,3}", r"\p{N}", r"\p{N}+"]
                .iter()
                .any(|digits| pattern == words(digits)) =>
            {
                Some(Self::Lines { slashes: false })
            }
            _ if pattern == gpt4o => Some(Self::Lines { slashes: true }),
            _ => None,
        }
    }
}

/// The steps of a normalizer, a pre-tokenizer or a post-processor, in order.
pub(super) fn steps(of: Option<&impl serde::Serialize>) -> Option<Vec<Value>> {
    fn flatten(value: Value, steps: &mut Vec<Value>) {
        let lists = ["normalizers", "pretokenizers", "processors"]
            .map(|key| value[key].as_array().cloned());
        match lists.into_iter().flatten().next() {
            Some(list) => list.into_iter().for_each(|value| flatten(value, steps)),
            None => steps.push(value),
        }
    }
    let mut found = Vec::new();
    if let Some(of) = of {
        flatten(serde_json::to_value(of).ok()?, &mut found);
    }
    Some(found)
}

fn kind(step: &Value) -> &str {
    step["type"].as_str().unwrap_or_default()
}

fn one_character(text: &str) -> Option<char> {
    let mut characters = text.chars();
    characters.next().filter(|_| characters.as_str().is_empty())
}

/// The character for a space after normalizers that only add one before a text and replace all
/// spaces.
fn space_of(normalizers: &[Value]) -> Option<char> {
    let replaces = match normalizers {
        [] => return Some(' '),
        [replaces] => replaces,
        [prepends, replaces] if kind(prepends) == "Prepend" => replaces,
        _ => return None,
    };
    let is_plain = kind(replaces) == "Replace" && replaces["pattern"]["String"] == " ";
    replaces["content"].as_str().filter(|_| is_plain).and_then(one_character)
}

/// The added tokens as they appear in a text; `None` if a text may contain them in other forms.
fn texts_of_added(tokenizer: &Tokenizer) -> Option<Texts> {
    let normalizers = steps(tokenizer.get_normalizer())?;
    let kinds: Vec<&str> = normalizers.iter().map(kind).collect();
    let text = |(id, token): (u32, tokenizers::AddedToken)| {
        let content = token.content;
        let text = match kinds.as_slice() {
            _ if !token.normalized => content,
            [] => content,
            // Characters that NFC produces from others: a Kelvin sign becomes K.
            ["NFC"] if content.is_ascii() && !content.contains(['K', ';', '`']) => content,
            ["Replace"] | ["Prepend", "Replace"] => {
                let space = space_of(&normalizers)?;
                let bare = content.trim_matches([' ', space]);
                match bare {
                    "" => " ".into(),
                    bare if bare.contains([' ', space]) => return None,
                    bare => bare.into(),
                }
            }
            _ => return None,
        };
        Some((text, id))
    };
    Texts::new(added_tokens(tokenizer).into_iter().map(text).collect::<Option<Vec<_>>>()?)
}
