//! Tests of tokenizers: round trips, training, and unusable files.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Random, names, write};
use crate::config::TokenizerOptions;
use crate::data::{Corpus, Tokenizer};

const TEXT: &str = "fn main() { println!(\"hello\"); }\n\nfn hello() -> String { \"hello\".into() }\n\nÜber allen Gipfeln 𝄞\n";

fn corpus(folder: &Path, content: &str) -> Corpus {
    Corpus::scan(&[write(folder, "corpus.txt", content)], Path::new("no-cache")).unwrap()
}

fn trained(vocab_size: usize, cache: &Path, content: &str) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::open(&format!("train:{vocab_size}"), Some(&corpus(folder.path(), content)), cache)
        .unwrap()
}

fn refusal(spec: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::open(spec, Some(&corpus(folder.path(), TEXT)), folder.path())
        .unwrap_err()
        .to_string()
}

#[test]
fn bytes_are_tokens_and_256_ends_a_document() {
    let tokenizer = Tokenizer::byte();
    assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (257, Some(256)));
    assert_eq!(tokenizer.encode("aü").unwrap(), [97, 195, 188]);
    assert_eq!(tokenizer.decode(&[97, 195, 188, 256, 195, 98]).unwrap(), "aü\u{fffd}b");
}

#[test]
fn a_trained_vocabulary_gives_every_text_back() {
    let cache = tempfile::tempdir().unwrap();
    let tokenizer = trained(300, cache.path(), TEXT);
    // Also text it was not trained on, because all bytes are tokens.
    for text in
        [TEXT, "", " ", "\n\n", "漢字 <|endofText|> \u{0} emoji 🦀", "  leading and trailing  "]
    {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
    }
    assert!(
        tokenizer.vocab_size() > 257 && tokenizer.vocab_size() <= 300,
        "{}",
        tokenizer.vocab_size()
    );
    assert!(tokenizer.encode("hello").unwrap().len() < 5);
}

#[test]
fn the_end_of_a_document_spelled_out_is_one_unless_text_is_taken_literally() {
    let cache = tempfile::tempdir().unwrap();
    let tokenizer = trained(300, cache.path(), TEXT);
    let eod = tokenizer.eod().unwrap();
    assert_eq!(tokenizer.encode("a<|endoftext|>b").unwrap()[1], eod);
    assert_eq!(tokenizer.decode(&[eod]).unwrap(), "");
    tokenizer.save_into(cache.path()).unwrap();
    let options = TokenizerOptions { split_special_tokens: true, ..Default::default() };
    let literal =
        Tokenizer::open_with(&cache.path().display().to_string(), &options, None, Path::new(""))
            .unwrap();
    let tokens = literal.encode("a<|endoftext|>b").unwrap();
    assert!(
        !tokens.contains(&eod) && literal.decode(&tokens).unwrap() == "a<|endoftext|>b",
        "{tokens:?}"
    );
    assert_ne!(literal.key(), tokenizer.key(), "what one made of a text is not the other's");
}

#[test]
fn training_is_deterministic() {
    // Many equal counts, so that ties would show.
    let content: String =
        (0..3000).map(|i| format!("w{} x{} {}\n\n", i % 97, i * 7 % 89, i * i % 1013)).collect();
    let files: Vec<String> = (0..4)
        .map(|_| {
            let cache = tempfile::tempdir().unwrap();
            trained(1000, cache.path(), &content);
            let name = names(cache.path())
                .into_iter()
                .find(|name| name.starts_with("tokenizer-"))
                .unwrap();
            fs::read_to_string(cache.path().join(name)).unwrap()
        })
        .collect();
    assert!(files.iter().all(|file| file == &files[0]));
}

#[test]
fn a_cached_vocabulary_that_was_changed_is_trained_anew() {
    let cache = tempfile::tempdir().unwrap();
    trained(300, cache.path(), TEXT);
    let path = cache
        .path()
        .join(names(cache.path()).into_iter().find(|name| name.ends_with(".json")).unwrap());
    let whole = fs::read_to_string(&path).unwrap();
    // Still a tokenizer, but with other bytes.
    let changed = whole.replacen("<|endoftext|>", "<|endofsong|>", 1);
    assert_ne!(changed, whole);
    fs::write(&path, changed).unwrap();
    trained(300, cache.path(), TEXT);
    assert_eq!(fs::read_to_string(&path).unwrap(), whole);
}

#[test]
fn a_trained_vocabulary_is_cached_by_size_and_content() {
    let cache = tempfile::tempdir().unwrap();
    trained(300, cache.path(), TEXT);
    let first = names(cache.path());
    trained(300, cache.path(), TEXT);
    assert_eq!(names(cache.path()), first);
    trained(301, cache.path(), TEXT);
    trained(300, cache.path(), "another text, another text");
    // Two vocabularies and their checksums.
    assert_eq!(names(cache.path()).len(), first.len() + 4);
}

#[test]
fn a_damaged_cached_vocabulary_is_trained_anew() {
    let cache = tempfile::tempdir().unwrap();
    let before = trained(300, cache.path(), TEXT);
    let path = cache
        .path()
        .join(names(cache.path()).into_iter().find(|name| name.ends_with(".json")).unwrap());
    let content = fs::read(&path).unwrap();
    fs::write(&path, &content[..content.len() / 2]).unwrap();
    assert_eq!(
        trained(300, cache.path(), TEXT).encode(TEXT).unwrap(),
        before.encode(TEXT).unwrap()
    );
    assert_eq!(fs::read(&path).unwrap(), content);
}

#[test]
fn a_vocabulary_without_room_for_bytes_is_refused() {
    for spec in ["train:256", "train:0"] {
        assert!(refusal(spec).contains("at least 257"), "{}", refusal(spec));
    }
    for spec in ["train:", "train:many", "train:-1"] {
        assert!(refusal(spec).contains("not a vocabulary size"), "{}", refusal(spec));
    }
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for content in ["", "{}", "{\"model\": 1}", "not json"] {
        let path = write(folder.path(), "tokenizer.json", content);
        let message = refusal(&path.display().to_string());
        assert!(message.contains("tokenizer.json: is not a usable"), "{message}");
    }
    // The `tokenizers` crate continues counting from the largest id.
    for (vocab, added) in [("4294967295", "1"), ("0", "4294967295")] {
        let content = format!(
            r#"{{"version": "1.0", "added_tokens": [{{"id": {added}, "content": "b", "single_word": false,
            "lstrip": false, "rstrip": false, "normalized": false, "special": true}}],
            "model": {{"type": "BPE", "vocab": {{"a": {vocab}}}, "merges": []}}}}"#
        );
        let path = write(folder.path(), "tokenizer.json", &content);
        let message = refusal(&path.display().to_string());
        assert!(message.contains("has the token id 4294967295"), "{message}");
    }
    let message = refusal("no/such/tokenizer.json");
    assert!(
        message.contains("no/such/tokenizer.json: does not exist")
            && message.contains("train:VOCAB"),
        "{message}"
    );
}

/// For any bytes of a tokenizer.json, opening it and encoding with it gives tokens or an error.
#[test]
fn random_damage_to_a_tokenizer_never_panics() {
    let folder = tempfile::tempdir().unwrap();
    trained(300, folder.path(), TEXT);
    let name = names(folder.path()).into_iter().find(|name| name.ends_with(".json")).unwrap();
    let content = fs::read(folder.path().join(&name)).unwrap();
    let mut random = Random(99);
    for _ in 0..300 {
        let mut damaged = content.clone();
        for _ in 0..1 + random.below(3) {
            let at = random.below(damaged.len());
            damaged[at] = b' ' + random.below(95) as u8;
        }
        if random.below(8) == 0 {
            damaged.truncate(random.below(damaged.len()));
        }
        let path = write(folder.path(), "tokenizer.json", damaged);
        if let Ok(tokenizer) = Tokenizer::open(&path.display().to_string(), None, folder.path()) {
            let _ = tokenizer.encode(TEXT).and_then(|tokens| tokenizer.decode(&tokens));
        }
    }
}

/// A small word-level vocabulary.
const WORDS: &str = r#"{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
  "stride": 0}, "padding": null, "added_tokens": [{"id": 3, "content": "</s>", "single_word": false, "lstrip": false,
  "rstrip": false, "normalized": false, "special": true}], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
  "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 5, "[UNK]": 2}, "unk_token": "[UNK]"}}"#;

#[test]
fn a_tokenizer_json_is_read_with_its_end_of_text_and_without_its_truncation() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "tokenizer.json", WORDS);
    // The folder works too.
    let tokenizer =
        Tokenizer::open(&folder.path().display().to_string(), None, Path::new("no-cache")).unwrap();
    // Token 5 exists, so the vocabulary has six tokens, even with gaps.
    assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (6, Some(3)));
    assert_eq!(tokenizer.encode("a b c a").unwrap(), [0, 5, 2, 0]);
    // It has three gaps.
    assert_eq!(tokenizer.absent(9), [1..2, 4..5, 6..9]);
    assert_eq!(
        tokenizer.decode(&[1, 0, 4, 6, u32::MAX]).unwrap(),
        "a",
        "ids that are no tokens have no text"
    );
}

#[test]
fn the_configuration_beside_it_says_which_token_ends_a_document() {
    for config in [r#"{"eos_token": "b"}"#, r#"{"eos_token": {"content": "b"}}"#] {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "tokenizer.json", WORDS);
        write(folder.path(), "tokenizer_config.json", config);
        assert_eq!(
            Tokenizer::open(&path.display().to_string(), None, Path::new("no-cache"))
                .unwrap()
                .eod(),
            Some(5)
        );
    }
}

#[test]
fn the_configuration_beside_it_says_whether_text_is_taken_literally() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "tokenizer.json", WORDS);
    let open = |path: &Path, literal: bool| {
        let options = TokenizerOptions { split_special_tokens: literal, ..Default::default() };
        Tokenizer::open_with(&path.display().to_string(), &options, None, Path::new("no-cache"))
            .unwrap()
    };
    let by_flag = open(&path, true);
    write(folder.path(), "tokenizer_config.json", r#"{"split_special_tokens": true}"#);
    let by_file = open(&path, false);
    assert_eq!(by_file.encode("a </s>").unwrap(), by_flag.encode("a </s>").unwrap());
    assert_eq!(by_file.key(), by_flag.key());
    // A copy written elsewhere records the same properties, and no others.
    let other = tempfile::tempdir().unwrap();
    by_file.save_into(other.path()).unwrap();
    assert_eq!(open(other.path(), false).key(), by_flag.key());
    write(folder.path(), "tokenizer_config.json", "{}");
    let not = open(&path, false);
    assert_ne!(not.encode("a </s>").unwrap(), by_flag.encode("a </s>").unwrap());
    not.save_into(other.path()).unwrap();
    assert_eq!(open(other.path(), false).key(), not.key());
}

#[test]
fn what_is_said_beside_it_and_is_not_so_is_told() {
    let words = WORDS.replace(
        r#"{"type": "Whitespace"}"#,
        r#"{"type": "Sequence", "pretokenizers": [{"type": "Whitespace"},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]}"#,
    );
    let words = words.replace(
        r#""normalizer": null"#,
        r#""normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true,
            "strip_accents": null, "lowercase": true}"#,
    );
    for (config, told) in [
        (
            r#"{"eos_token": "</s>", "add_prefix_space": false, "do_lower_case": true, "strip_accents": true}"#,
            None,
        ),
        (r#"{"do_lower_case": null, "tokenize_chinese_chars": true, "pad_token": null}"#, None),
        (r#"{"eos_token": "<|new|>"}"#, Some("lacks the special tokens \"<|new|>\"")),
        (
            r#"{"pad_token": "<p>", "additional_special_tokens": ["<q>", "b"]}"#,
            Some("tokens \"<p>\", \"<q>\" that"),
        ),
        (r#"{"add_prefix_space": true}"#, Some("add_prefix_space to true, but")),
        (r#"{"do_lower_case": false}"#, Some("do_lower_case to false, but")),
        (r#"{"strip_accents": false}"#, Some("strip_accents to false, but")),
        (r#"{"tokenize_chinese_chars": false}"#, Some("tokenize_chinese_chars to false, but")),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "tokenizer.json", &words);
        write(folder.path(), "tokenizer_config.json", config);
        let tokenizer =
            Tokenizer::open(&folder.path().display().to_string(), None, Path::new("no-cache"))
                .unwrap();
        let notes = tokenizer.notes();
        assert_eq!(notes.len(), usize::from(told.is_some()), "{config}: {notes:?}");
        assert!(
            notes.iter().zip(told).all(|(note, part)| note.contains(part)),
            "{config}: {notes:?}"
        );
        assert_eq!(
            tokenizer.lacks_eod().contains("no \"<|new|>\", but the file beside it names"),
            config.contains("<|new|>")
        );
    }
}

/// The folder where a tokenizer is saved may hold files of another model, or none.
#[test]
fn a_saved_tokenizer_opens_as_the_same_with_its_end_of_a_document() {
    let chat = |eos: &str| format!(r#"{{"eos_token": {eos}, "chat_template": "hello"}}"#);
    let open = |folder: &Path| {
        Tokenizer::open(&folder.display().to_string(), None, Path::new("no-cache")).unwrap()
    };
    let none = WORDS.replace("</s>", "[SEP]");
    for (words, declared) in [
        (WORDS, None),
        (WORDS, Some(r#"{"eos_token": "b"}"#)),
        (WORDS, Some(r#"{"eos_token": {"content": "b"}}"#)),
        // An eos_token outside the vocabulary: documents have no end, although a well-known end
        // exists.
        (WORDS, Some(r#"{"eos_token": "<|im_end|>"}"#)),
        (&none, None),
    ] {
        for there in [
            None,
            Some(chat("\"b\"")),
            Some(chat("\"</s>\"")),
            Some(chat("null")),
            Some("not json".into()),
        ] {
            let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            write(from.path(), "tokenizer.json", words);
            if let Some(config) = declared {
                write(from.path(), "tokenizer_config.json", config);
            }
            if let Some(config) = &there {
                write(to.path(), "tokenizer_config.json", config);
            }
            let tokenizer = open(from.path());
            tokenizer.save_into(to.path()).unwrap();
            let again = open(to.path());
            let case = format!("{declared:?} where {there:?} was");
            assert_eq!((again.key(), again.eod()), (tokenizer.key(), tokenizer.eod()), "{case}");
            let config =
                fs::read_to_string(to.path().join("tokenizer_config.json")).unwrap_or_default();
            // Other settings in the file stay.
            assert_eq!(
                config.contains("hello"),
                there.is_some_and(|there| there.contains("hello")),
                "{case}"
            );
            tokenizer.save_into(to.path()).unwrap();
            assert_eq!(
                fs::read_to_string(to.path().join("tokenizer_config.json")).unwrap_or_default(),
                config
            );
        }
    }
}

#[test]
fn gpt2s_two_files_are_its_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let json: serde_json::Value = serde_json::from_slice(
        &fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tokenizers/gpt2.json"))
            .unwrap(),
    )
    .unwrap();
    let model = &json["model"];
    let vocab = write(folder.path(), "vocab.json", model["vocab"].to_string());
    let pairs = model["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pair| format!("{} {}\n", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()));
    let merges =
        write(folder.path(), "merges.txt", format!("#version: 0.2\n{}", pairs.collect::<String>()));
    let whole = write(folder.path(), "tokenizer.json", json.to_string());
    let open = |spec: &Path, merges: Option<&Path>| {
        let options =
            TokenizerOptions { merge_file: merges.map(Path::to_path_buf), ..Default::default() };
        Tokenizer::open_with(&spec.display().to_string(), &options, None, Path::new("no-cache"))
    };
    let (two, one) = (open(&vocab, Some(&merges)).unwrap(), open(&whole, None).unwrap());
    let text = "Hello there.\n\nGeneral Kenobi <|endoftext|> they'll 漢字";
    assert_eq!(two.encode(text).unwrap(), one.encode(text).unwrap());
    assert_eq!((two.eod(), two.vocab_size()), (one.eod(), one.vocab_size()));
    let saved = tempfile::tempdir().unwrap();
    two.save_into(saved.path()).unwrap();
    assert_eq!(open(saved.path(), None).unwrap().encode(text).unwrap(), one.encode(text).unwrap());
    // Files with other contents.
    let bad = write(folder.path(), "bad.txt", "#version: 0.2\na b c\n");
    for (vocab, merges, part) in [
        (&vocab, Some(&bad), "bad.txt: line 2 is not a pair"),
        (&merges, Some(&merges), "merges.txt: is not a JSON object"),
        (&whole, Some(&merges), "tokenizer.json: is not a vocabulary"),
        (
            &folder.path().join("none.json"),
            Some(&merges),
            "none.json: does not exist; give GPT-2's vocab.json",
        ),
        (&vocab, Some(&folder.path().join("none.txt")), "none.txt: does not exist"),
        (&vocab, None, "is a vocabulary without its merges"),
    ] {
        let message = open(vocab, merges.map(PathBuf::as_path)).unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn tokenizers_of_other_kinds_are_named_with_what_to_do() {
    for (name, part) in [
        ("tokenizer.model", "SentencePiece"),
        ("vocab.json", "--vocab-file vocab.json --merge-file merges.txt"),
        ("vocab.txt", "WordPiece"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let file = write(folder.path(), name, "{}");
        for spec in [folder.path(), &file] {
            let message = refusal(&spec.display().to_string());
            assert!(message.contains(part) && message.contains("save_pretrained"), "{message}");
        }
        // Beside a tokenizer.json it does not matter.
        write(folder.path(), "tokenizer.json", WORDS);
        Tokenizer::open(&folder.path().display().to_string(), None, Path::new("no-cache")).unwrap();
    }
}

#[test]
fn numbers_are_tokens_where_there_is_no_vocabulary() {
    let tokenizer = Tokenizer::open("null:50", None, Path::new("no-cache")).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (51, Some(50)));
    assert_eq!(tokenizer.encode("0 7\n49").unwrap(), [0, 7, 49]);
    assert_eq!(tokenizer.decode(&[0, 7, 50, 49]).unwrap(), "0 7 49");
    assert!(tokenizer.encode("a").unwrap_err().to_string().contains("numbers below 51"));
    assert!(refusal("null:x").contains("null:32000"));
}

#[test]
fn files_beside_a_tokenizer_that_cannot_be_right_are_refused_by_name() {
    for (name, content, part) in [
        (
            "added_tokens.json",
            r#"{"<new>": 9}"#,
            "the id 9, but the next free id after the vocabulary of tokenizer.json is 4",
        ),
        ("added_tokens.json", r#"{"<new>": "x"}"#, "is not a token with an id"),
        (
            "tokenizer_config.json",
            r#"{"added_tokens_decoder": {"x": {"content": "<new>"}}}"#,
            "added_tokens_decoder.x",
        ),
        ("special_tokens_map.json", "[1", "is not a JSON object"),
        ("special_tokens_map.json", "[1]", "is not a JSON object"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "tokenizer.json", WORDS);
        write(folder.path(), name, content);
        let message = refusal(&folder.path().display().to_string());
        assert!(message.contains(name) && message.contains(part), "{message}");
    }
}

#[test]
fn a_template_of_tokens_that_are_not_there_is_refused() {
    let template = |single: &str| {
        let processor = format!(
            r#""post_processor": {{"type": "TemplateProcessing", "single": [{single}], "pair": [],
                "special_tokens": {{"</s>": {{"id": "</s>", "ids": [3], "tokens": ["</s>"]}}}}}}"#
        );
        let folder = tempfile::tempdir().unwrap();
        write(
            folder.path(),
            "tokenizer.json",
            WORDS.replace(r#""post_processor": null"#, &processor),
        );
        let opened =
            Tokenizer::open(&folder.path().display().to_string(), None, Path::new("no-cache"));
        opened.and_then(|tokenizer| tokenizer.encode_prompt("a")).map_err(|error| error.to_string())
    };
    let (text, token) = (
        r#"{"Sequence": {"id": "A", "type_id": 0}}"#,
        r#"{"SpecialToken": {"id": "</s>", "type_id": 0}}"#,
    );
    assert_eq!(template(&format!("{token}, {text}")).unwrap(), [3, 0]);
    for (single, part) in [
        (format!("{}, {text}", token.replace("</s>", "<x>")), "<x>"),
        (format!("{text}, {}", text.replace('A', "B")), "Sequence"),
        (format!("{text}, {text}"), "repeats the text 2 times"),
        (token.into(), "repeats the text 0 times"),
    ] {
        let message = template(&single).unwrap_err();
        assert!(message.contains(part) && message.contains("tokenizer.json"), "{message}");
    }
}
