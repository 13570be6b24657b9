//! Tests that documents become the ids of one call of the tokenizer on the whole document, however
//! they are read.
//!
//! `tests/fixtures/tokenizers/make_tokenizers.py` creates the tokenizers and the results of
//! transformers.

use std::io::Cursor;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::{Random, write};
use crate::Result;
use crate::config::TokenizerOptions;
use crate::data::{Corpus, Part, Parts, SplitPoints, Tokenizer, tokenize};

/// Pieces of test texts: all kinds of line breaks, white space and added tokens.
const PIECES: [&str; 62] = [
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n",
    "\n\n",
    "\n\n",
    "\n\n\n",
    "\r\n",
    "\r\n\r\n",
    "\t",
    "\u{a0}",
    "\u{3000}",
    "\u{2028}",
    "\u{85}",
    "▁",
    "Hello",
    "there",
    "the",
    "General",
    " Kenobi",
    "then they'll",
    "'s",
    "'",
    "word",
    "swords",
    "paragraph of it",
    "a",
    "x",
    "über",
    "e\u{301}",
    "\u{301}",
    "漢字",
    "🦀",
    "🦀🦀",
    "½½",
    "\u{fffd}",
    "\u{212a}",
    "¨",
    "1",
    "12",
    "½",
    ".",
    "...",
    ",",
    "/",
    "//",
    ".\n/",
    "x \n\ny",
    "<|endoftext|>",
    "<|im_start|>",
    "<s>",
    "</s>",
    "<mask>",
    "<tool>",
    "<left>",
    "<right>",
    "[SEP]",
    "[cls]",
    "<unk>",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tokenizers")).join(name)
}

fn opened(name: &str, options: &TokenizerOptions) -> Tokenizer {
    Tokenizer::open_with(&fixture(name).display().to_string(), options, None, Path::new("no-cache"))
        .unwrap()
}

fn parts(text: &str, split_points: &Arc<SplitPoints>) -> Vec<Part> {
    let reader = Box::new(Cursor::new(text.as_bytes().to_vec()));
    let mut parts = Parts::new(Path::new("x.txt"), reader, split_points.clone());
    std::iter::from_fn(|| parts.read().transpose()).map(Result::unwrap).collect()
}

fn sequences(tokenizer: &Tokenizer, parts: &[Part]) -> Vec<Vec<u32>> {
    parts.iter().flat_map(|part| tokenizer.encode_part(part).unwrap()).collect()
}

/// All names, and whether documents are cut before tokenizing.
const TOKENIZERS: [(&str, bool); 14] = [
    ("gpt2", true),
    ("neox", true),
    ("smollm", true),
    ("roberta", true),
    ("llama3", true),
    ("qwen2", true),
    ("gpt4o", true),
    ("llama2", true),
    ("mistral", true),
    ("gemma", true),
    ("always", true),
    ("unigram", true),
    ("t5", false),
    ("bert", true),
];

#[test]
fn the_parts_of_a_document_have_the_ids_of_one_call_on_the_whole() {
    for (name, is_cut) in TOKENIZERS {
        let file = format!("{name}.json");
        for literal in [false, true] {
            let options = TokenizerOptions { split_special_tokens: literal, ..Default::default() };
            let tokenizer = opened(&file, &options);
            let mut library = tokenizers::Tokenizer::from_file(fixture(&file)).unwrap();
            library.set_encode_special_tokens(literal);
            let split_points = Arc::new(tokenizer.split_points());
            assert_eq!(split_points.never(), !is_cut, "{name}");
            let mut random = Random(5);
            let (mut texts, mut parts_of_all, mut sequences_of_all) = (0, 0, 0);
            for _ in 0..60 {
                // Mostly a few kinds of pieces, so that rare combinations occur.
                let kinds: Vec<&str> = (0..6).map(|_| PIECES[random.below(PIECES.len())]).collect();
                let piece = |random: &mut Random| match random.below(3) {
                    0 => PIECES[random.below(PIECES.len())],
                    1 => "the cat sat on the mat",
                    _ => kinds[random.below(kinds.len())],
                };
                let text: String = (0..1 + random.below(200)).map(|_| piece(&mut random)).collect();
                let expected = library.encode(text.as_str(), true).unwrap().get_ids().to_vec();
                let parts = parts(&text, &split_points);
                let sequences = sequences(&tokenizer, &parts);
                assert_eq!(sequences.concat(), expected, "{name}: {text:?} in {parts:#?}");
                assert_eq!(parts.iter().map(|part| part.text.as_str()).collect::<String>(), text);
                texts += 1;
                parts_of_all += parts.len();
                sequences_of_all += sequences.len();
                let [begins, ends] = [|part: &Part| part.first, |part: &Part| part.last]
                    .map(|f| parts.iter().filter(|part| f(part)).count());
                assert_eq!((begins, ends), (1, 1), "{name}: {text:?}");
            }
            assert!(
                is_cut == (parts_of_all > 2 * texts),
                "{name}: {parts_of_all} parts of {texts} texts"
            );
            assert!(
                sequences_of_all > 2 * texts,
                "{name}: {sequences_of_all} sequences of {texts} texts"
            );
        }
    }
}

/// Tests every place where a text may be cut, not only those near the end of a paragraph.
#[test]
fn wherever_a_text_may_be_cut_its_ids_stay_the_same() {
    for (name, _) in TOKENIZERS {
        let tokenizer = opened(&format!("{name}.json"), &TokenizerOptions::default());
        let split_points = tokenizer.split_points();
        let mut random = Random(11);
        let mut allowed = 0;
        for _ in 0..200 {
            let text: String =
                (0..1 + random.below(12)).map(|_| PIECES[random.below(PIECES.len())]).collect();
            let whole = tokenizer.encode(&text).unwrap();
            for at in (1..text.len()).filter(|&at| text.is_char_boundary(at)) {
                if !split_points.allow(&text, at, true) {
                    // Nor may it be cut before all of the text is available.
                    let mut ends = (at + 1..text.len()).filter(|&end| text.is_char_boundary(end));
                    assert!(
                        !ends.any(|end| split_points.allow(&text[..end], at, false)),
                        "{name}: {text:?}"
                    );
                    continue;
                }
                let part =
                    |text: &str, before| Part { text: text.into(), before, ..Part::default() };
                let before = text[..at].chars().next_back().filter(|_| split_points.overlap());
                let two = [part(&text[..at], None), part(&text[at..], before)];
                let ids = sequences(&tokenizer, &two).concat();
                assert_eq!(ids, whole, "{name}: {:?} | {:?}", &text[..at], &text[at..]);
                allowed += 1;
            }
        }
        assert!(split_points.never() || allowed > 40, "{name}: {allowed}");
    }
}

#[test]
fn what_transformers_makes_of_texts_is_what_is_made_of_them_here() {
    let expected: Vec<Value> =
        serde_json::from_slice(&std::fs::read(fixture("expected.json")).unwrap()).unwrap();
    assert_eq!(expected.len(), 6);
    for case in expected {
        let folder = tempfile::tempdir().unwrap();
        std::fs::copy(fixture("mistral.json"), folder.path().join("tokenizer.json")).unwrap();
        for (name, content) in case["files"].as_object().unwrap() {
            write(folder.path(), name, content.as_str().unwrap());
        }
        let open = |folder: &Path, literal| {
            let options = TokenizerOptions { split_special_tokens: literal, ..Default::default() };
            Tokenizer::open_with(
                &folder.display().to_string(),
                &options,
                None,
                Path::new("no-cache"),
            )
            .unwrap()
        };
        let name = &case["name"];
        let eos = open(folder.path(), false).eod().map(u64::from);
        assert_eq!(eos, case["eos"].as_u64(), "{name}");
        assert_eq!(
            open(folder.path(), false).vocab_size() as u64,
            case["size"].as_u64().unwrap(),
            "{name}"
        );
        // A copy beside checkpoints is the same, using only the files written there.
        let saved = tempfile::tempdir().unwrap();
        open(folder.path(), false).save_into(saved.path()).unwrap();
        for folder in [folder.path(), saved.path()] {
            for text in case["texts"].as_array().unwrap() {
                let [spelled, ids, literal] = [0, 1, 2].map(|i| &text[i]);
                for (ids, is_literal) in [(ids, false), (literal, true)] {
                    let tokens = open(folder, is_literal)
                        .encode_part(&Part::whole(spelled.as_str().unwrap().into()));
                    let ids: Vec<u32> = serde_json::from_value(ids.clone()).unwrap();
                    assert_eq!(tokens.unwrap().concat(), ids, "{name}, {spelled}, {is_literal}");
                }
            }
        }
    }
}

#[test]
fn a_text_file_has_the_tokens_of_the_same_text_anywhere_else() {
    let text = "Hello there.\n\nGeneral Kenobi.\n";
    for (name, _) in TOKENIZERS {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "two.txt", text);
        let corpus = Corpus::scan(&[path], folder.path()).unwrap();
        let tokenizer = opened(&format!("{name}.json"), &TokenizerOptions::default());
        let dataset = tokenize::tokenized(&corpus, &tokenizer, folder.path()).unwrap();
        let sequences = (0..dataset.num_sequences()).map(|i| dataset.read_sequence(i).unwrap());
        let ids = sequences.collect::<Vec<_>>().concat();
        let mut expected = tokenizer.encode_part(&Part::whole(text.into())).unwrap().concat();
        // An end that the tokenizer adds itself is the only one.
        if !tokenizer.ends_documents() {
            expected.extend(tokenizer.eod());
        }
        assert_eq!(ids, expected, "{name}");
        assert_eq!(
            tokenizer.ends_documents(),
            ["roberta", "unigram", "t5"].contains(&name),
            "{name}"
        );
        // A prompt has the same tokens except for the end.
        assert!(expected.starts_with(&tokenizer.encode_prompt(text).unwrap()), "{name}");
    }
}

#[test]
fn nothing_is_put_around_a_text_where_that_is_asked_for() {
    let options = TokenizerOptions { no_special_tokens: true, ..Default::default() };
    for (name, before, behind) in
        [("llama3", 1, 0), ("bert", 1, 1), ("gpt2", 0, 0), ("unigram", 0, 1)]
    {
        let file = format!("{name}.json");
        let of = |tokenizer: Tokenizer| {
            tokenizer.encode_part(&Part::whole("the cat".into())).unwrap().concat()
        };
        let (with, without) =
            (of(opened(&file, &TokenizerOptions::default())), of(opened(&file, &options)));
        assert_eq!(with[before..with.len() - behind], without, "{name}");
    }
}

#[test]
fn a_vocabulary_trained_on_text_sees_the_words_that_texts_are_cut_into() {
    let folder = tempfile::tempdir().unwrap();
    let content = "one two\n\nthree\n\n".repeat(100);
    let corpus = Corpus::scan(&[write(folder.path(), "t.txt", content)], folder.path()).unwrap();
    let tokenizer = Tokenizer::open("train:300", Some(&corpus), folder.path()).unwrap();
    let (whole, line) = (tokenizer.encode("\n\nthree").unwrap(), tokenizer.encode("\n").unwrap());
    assert_eq!(
        whole[..2],
        [line[0], line[0]],
        "no token has two ends of lines, as none is ever met"
    );
    assert_eq!(tokenizer.encode("\n\n").unwrap(), line.repeat(2));
}
