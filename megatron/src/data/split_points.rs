//! Where the text of a document can be cut so that the tokens of the parts, laid end to end, are
//! those of the whole.
//!
//! The ids of a document are those of one call of its tokenizer on the whole of it. A long one is
//! handed over in parts where that changes nothing, which is decided here by what the tokenizer is
//! made of; whatever is not known to be safe is never cut.

use std::collections::HashSet;

use serde_json::Value;
use tokenizers::{ModelWrapper, Tokenizer};

use super::added_tokens::{Texts, added_tokens};
use super::pretokenizer_cache::GPT2;

/// White space that is looked through around a cut, in bytes; where there is more, nothing is cut.
const LONGEST_RUN: usize = 256;
/// Bytes behind a cut, beside the longest added token, that are looked at.
const AHEAD: usize = 2 * LONGEST_RUN;

/// Where text can be cut.
#[derive(Clone, Debug)]
pub struct SplitPoints {
    rule: Rule,
    /// Tokens that are cut out first, as they stand in a text. Nothing is cut near them: they
    /// change what is done to their neighbours.
    added: Texts,
}

#[derive(Clone, Debug)]
enum Rule {
    Anywhere,
    Never,
    /// GPT-2's expression: words take one space before them along, and no other white space.
    Gpt2 {
        prefix: bool,
        digits: bool,
    },
    /// Llama 3's, Qwen's and GPT-4's: white space ends with its last line, and so do signs, that of
    /// GPT-4o with slashes behind it.
    Lines {
        slashes: bool,
    },
    /// White space separates words and is dropped.
    Space,
    /// Spaces are characters of the vocabulary.
    Characters(Characters),
}

/// A tokenizer without words, or with words that begin with a space (sentencepiece's).
#[derive(Clone, Debug)]
struct Characters {
    /// What stands for a space.
    space: char,
    /// Words begin with it, and are encoded by themselves.
    words: bool,
    pairs: Option<Pairs>,
}

/// The characters that tokens are made of.
#[derive(Clone, Debug)]
struct Pairs {
    /// Those that stand next to each other in a token: no other two are ever merged.
    adjacent: HashSet<(char, char)>,
    /// Those that are tokens; `None`: others are tokens of bytes. Unknown ones may be dropped, or
    /// be one token with their neighbours.
    known: Option<HashSet<char>>,
}

impl SplitPoints {
    /// Where a token is a byte.
    pub fn anywhere() -> Self {
        Self::without_added(Rule::Anywhere)
    }

    /// Between words as GPT-2 cuts them.
    pub fn between_words() -> Self {
        Self::without_added(Rule::Gpt2 { prefix: false, digits: false })
    }

    /// Behind white space, which is dropped.
    pub(super) fn behind_spaces() -> Self {
        Self::without_added(Rule::Space)
    }

    fn without_added(rule: Rule) -> Self {
        Self { rule, added: Texts::default() }
    }

    /// Those of a tokenizer.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let found = Rule::of(tokenizer).zip(texts_of_added(tokenizer));
        found.map_or_else(|| Self::without_added(Rule::Never), |(rule, added)| Self { rule, added })
    }

    /// Nothing is ever cut.
    pub fn never(&self) -> bool {
        matches!(self.rule, Rule::Never)
    }

    /// The first tokens of a part depend on there being text before it.
    pub(super) fn overlap(&self) -> bool {
        matches!(self.rule, Rule::Characters(_) | Rule::Gpt2 { prefix: true, .. })
    }

    /// Bytes behind a cut that are looked at.
    pub(super) fn ahead(&self) -> usize {
        if matches!(self.rule, Rule::Anywhere) { 1 } else { AHEAD + self.added.longest() }
    }

    /// Whether `text`, which begins where a document does or was cut, can be cut at byte `at`;
    /// `whole`: it ends where the document does.
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

/// The white space that a text begins with; `None` where it may go on behind what is there, or is
/// too long to be looked at.
fn spaces(text: &str) -> Option<&str> {
    let mut characters = text.char_indices().take_while(|(at, _)| *at <= LONGEST_RUN);
    let end = characters.find(|(_, c)| !c.is_whitespace());
    end.map(|(at, _)| &text[..at])
}

/// Words are ` ?letters`, ` ?digits`, ` ?signs` and `\s+(?!\S)|\s+`: white space but for its last
/// character, which a word takes along if it is a space, and which is a word of its own if not. So
/// they end before white space, before the last of several characters of it, and behind a single
/// one that is no space. Where digits are cut out first, what is before them is seen as the end of
/// a text.
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
    // A space that is put before a part would make them two.
    let is_single = before.chars().nth_back(1).is_none_or(|c| !c.is_whitespace());
    !prefix && a != ' ' && is_single
}

/// `\s*[\r\n]+` takes white space up to its last end of a line, before white space without one is
/// looked at; nothing else has the end of a line in it, but for signs, which take those along that
/// follow them. White space of other kinds goes with what is behind it.
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
    /// Those of a BPE model. `None` where tokens are made in other ways than by merging what stands
    /// next to each other in a text.
    fn of(model: &ModelWrapper) -> Option<Self> {
        let ModelWrapper::BPE(bpe) = model else { return None };
        let is_empty = |affix: &Option<String>| affix.as_ref().is_none_or(String::is_empty);
        // A whole text that is a token would be one without being merged.
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
            // One that a byte, or what is unknown, would be merged into.
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
    /// `None`: not known.
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
            // NFC makes no white space of other characters, nor others of it, and joins nothing to
            // it.
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

/// What a normalizer, a pre-tokenizer or a post-processor does, one thing after another.
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

/// What stands for a space behind normalizers that do nothing but to put one before a text and to
/// replace all of them.
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

/// The added tokens as they stand in a text; `None` where a text may hold them in other forms.
fn texts_of_added(tokenizer: &Tokenizer) -> Option<Texts> {
    let normalizers = steps(tokenizer.get_normalizer())?;
    let kinds: Vec<&str> = normalizers.iter().map(kind).collect();
    let text = |(id, token): (u32, tokenizers::AddedToken)| {
        let content = token.content;
        let text = match kinds.as_slice() {
            _ if !token.normalized => content,
            [] => content,
            // Characters that NFC makes of others: a Kelvin sign is a K.
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
