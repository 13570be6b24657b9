//! Tests of encoding word by word: the tokens are those of the tokenizers crate, and unsupported
//! tokenizers are left to it.

use std::str::FromStr;

use tokenizers::Tokenizer;

use super::Random;
use crate::data::bpe::train_bpe;
use crate::data::pretokenizer_cache::PretokenizerCache;

/// Pieces of text for every alternative of the expressions, complete and cut.
const PIECES: [&str; 40] = [
    " ",
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "\u{200b}",
    "'s",
    "'S",
    "'ll",
    "'",
    "’s",
    "a",
    "the",
    "The",
    "über",
    "e\u{301}",
    "漢字",
    "ﷺ",
    "नमस्ते",
    "🦀",
    "👩‍🔬",
    "1",
    "12",
    "1234567",
    "½",
    "٣",
    ".",
    "...",
    "(",
    "){",
    "_",
    "-",
    "\u{0}",
    "<|endoftext|>",
    "<tool>",
    "<to",
];
/// The expression that splits text into words for Llama 3; Qwen2's takes single digits.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

fn trained() -> serde_json::Value {
    let text =
        PIECES.concat().repeat(3) + "the then them 1234 12 under über und   there's they'll\n\n\n";
    serde_json::from_str(&train_bpe(330, std::iter::repeat_n(text, 3).map(Ok)).unwrap()).unwrap()
}

fn opened(json: &serde_json::Value) -> Tokenizer {
    Tokenizer::from_str(&json.to_string()).unwrap()
}

fn split(pattern: &str) -> serde_json::Value {
    let mut json = trained();
    json["pre_tokenizer"] = serde_json::json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]});
    json
}

/// Encodes random texts: none differently from the crate, with special tokens as text or not, and
/// all of them word by word if `all`.
fn compare(json: &serde_json::Value, all: bool) {
    for literal in [false, true] {
        let mut tokenizer = opened(json);
        tokenizer.set_encode_special_tokens(literal);
        compare_with(&tokenizer, all);
    }
}

fn compare_with(tokenizer: &Tokenizer, all: bool) {
    let words = PretokenizerCache::of(tokenizer).unwrap();
    let mut random = Random(7);
    let mut taken = 0;
    for _ in 0..2000 {
        let text: String =
            (0..random.below(24)).map(|_| PIECES[random.below(PIECES.len())]).collect();
        let expected = tokenizer.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
        if let Some(tokens) = words.encode(tokenizer, &text).unwrap() {
            assert_eq!(tokens, expected, "{text:?}");
            taken += 1;
        }
    }
    assert!(if all { taken == 2000 } else { (200..2000).contains(&taken) }, "{taken}");
}

#[test]
fn tokens_of_gpt2_are_those_of_the_library() {
    compare(&trained(), true);
}

#[test]
fn tokens_of_llama3_and_qwen2_are_those_of_the_library() {
    compare(&split(LLAMA3), true);
    compare(&split(&LLAMA3.replace("{1,3}", "")), true);
}

#[test]
fn what_an_expression_leaves_out_is_a_word_too() {
    compare(&split(r"\p{L}+|\s+(?!\S)|\s+"), true);
}

#[test]
fn texts_with_tokens_that_are_cut_out_first_are_left_to_the_library() {
    let mut json = trained();
    let token = serde_json::json!({"id": 330, "content": "<tool>", "single_word": false, "lstrip": true, "rstrip": false,
        "normalized": false, "special": false});
    json["added_tokens"].as_array_mut().unwrap().push(token);
    compare(&json, false);
    let tokenizer = opened(&json);
    assert_eq!(
        PretokenizerCache::of(&tokenizer).unwrap().encode(&tokenizer, "a <tool> b").unwrap(),
        None
    );
}

#[test]
fn long_words_and_many_different_ones_are_encoded_alike() {
    let tokenizer = opened(&trained());
    let words = PretokenizerCache::of(&tokenizer).unwrap();
    let mut text = "the".repeat(1000) + &" ".repeat(1000);
    // More words than the cache holds.
    (0..140_000).for_each(|i| text += &format!(" {i}"));
    for text in [text.as_str(), &text[..4000], &text[text.len() - 4000..]] {
        let expected = tokenizer.encode_fast(text, false).unwrap();
        assert_eq!(words.encode(&tokenizer, text).unwrap().unwrap(), expected.get_ids());
    }
}

#[test]
fn tokenizers_that_do_more_are_left_to_the_library() {
    let changed = |pointer: &str, value: serde_json::Value| {
        let mut json = trained();
        *json.pointer_mut(pointer).unwrap_or_else(|| panic!("{pointer}")) = value;
        opened(&json)
    };
    let space = serde_json::json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let others = [
        changed("/normalizer", serde_json::json!({"type": "NFC"})),
        changed("/pre_tokenizer", space),
        changed("/pre_tokenizer", serde_json::json!({"type": "Whitespace"})),
        changed("/model/dropout", serde_json::json!(0.5)),
        opened(&split(r"(?<!a)b|\s+(?!\S)|\s+")),
        opened(&split(r"\p{L}+|\s+")),
    ];
    for (i, tokenizer) in others.iter().enumerate() {
        assert!(PretokenizerCache::of(tokenizer).is_none(), "{i}");
    }
    // And an expression that would never advance.
    let tokenizer = opened(&split(r"b*|\s+(?!\S)|\s+"));
    assert_eq!(PretokenizerCache::of(&tokenizer).unwrap().encode(&tokenizer, "abc").unwrap(), None);
}
