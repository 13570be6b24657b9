//! Tokenizers: round trips, training, and files that are none.

use std::fs;
use std::path::Path;

use super::{Random, names, write};
use crate::data::{Corpus, Tokenizer};

const TEXT: &str =
    "fn main() { println!(\"hello\"); }\n\nfn hello() -> String { \"hello\".into() }\n\nÜber allen Gipfeln 𝄞\n";

fn corpus(folder: &Path, content: &str) -> Corpus {
    Corpus::scan(&[write(folder, "corpus.txt", content)], Path::new("no-cache")).unwrap()
}

fn trained(vocab_size: usize, cache: &Path, content: &str) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::open(&format!("train:{vocab_size}"), Some(&corpus(folder.path(), content)), cache).unwrap()
}

fn refusal(spec: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::open(spec, Some(&corpus(folder.path(), TEXT)), folder.path()).unwrap_err().to_string()
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
    // Text it never saw, too: all bytes are tokens.
    for text in [TEXT, "", " ", "\n\n", "漢字 <|endoftext|> \u{0} emoji 🦀", "  leading and trailing  "] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()).unwrap(), text);
    }
    assert!(tokenizer.vocab_size() > 257 && tokenizer.vocab_size() <= 300, "{}", tokenizer.vocab_size());
    assert!(tokenizer.encode("hello").unwrap().len() < 5);
}

#[test]
fn text_cannot_spell_the_end_of_a_document() {
    let cache = tempfile::tempdir().unwrap();
    let tokenizer = trained(300, cache.path(), TEXT);
    let eod = tokenizer.eod().unwrap();
    assert!(!tokenizer.encode("a<|endoftext|>b").unwrap().contains(&eod));
    assert_eq!(tokenizer.decode(&[eod]).unwrap(), "");
}

#[test]
fn training_is_deterministic() {
    // Many equal counts, so that ties would show.
    let content: String = (0..3000).map(|i| format!("w{} x{} {}\n\n", i % 97, i * 7 % 89, i * i % 1013)).collect();
    let files: Vec<String> = (0..4)
        .map(|_| {
            let cache = tempfile::tempdir().unwrap();
            trained(1000, cache.path(), &content);
            let name = names(cache.path()).into_iter().find(|name| name.starts_with("tokenizer-")).unwrap();
            fs::read_to_string(cache.path().join(name)).unwrap()
        })
        .collect();
    assert!(files.iter().all(|file| file == &files[0]));
}

#[test]
fn a_cached_vocabulary_that_was_changed_is_trained_anew() {
    let cache = tempfile::tempdir().unwrap();
    trained(300, cache.path(), TEXT);
    let path = cache.path().join(names(cache.path()).into_iter().find(|name| name.ends_with(".json")).unwrap());
    let whole = fs::read_to_string(&path).unwrap();
    // Still a tokenizer, of other bytes.
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
    let path = cache.path().join(names(cache.path()).into_iter().find(|name| name.ends_with(".json")).unwrap());
    let content = fs::read(&path).unwrap();
    fs::write(&path, &content[..content.len() / 2]).unwrap();
    assert_eq!(trained(300, cache.path(), TEXT).encode(TEXT).unwrap(), before.encode(TEXT).unwrap());
    assert_eq!(fs::read(&path).unwrap(), content);
}

#[test]
fn a_vocabulary_without_room_for_bytes_is_refused() {
    for spec in ["train:256", "train:0"] {
        assert!(refusal(spec).contains("at least 257"), "{}", refusal(spec));
    }
    for spec in ["train:", "train:many", "train:-1"] {
        assert!(refusal(spec).contains("no vocabulary size"), "{}", refusal(spec));
    }
}

#[test]
fn a_file_that_is_no_tokenizer_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    for content in ["", "{}", "{\"model\": 1}", "not json"] {
        let path = write(folder.path(), "tokenizer.json", content);
        let message = refusal(&path.display().to_string());
        assert!(message.contains("tokenizer.json: is no usable"), "{message}");
    }
    let message = refusal("no/such/tokenizer.json");
    assert!(message.contains("no/such/tokenizer.json: does not exist") && message.contains("train:VOCAB"), "{message}");
}

/// Whatever the bytes of a tokenizer.json, opening it and encoding with it ends in tokens or in an error.
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

/// A word-level vocabulary, small enough to write down.
const WORDS: &str = r#"{"version": "1.0", "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst",
  "stride": 0}, "padding": null, "added_tokens": [{"id": 3, "content": "</s>", "single_word": false, "lstrip": false,
  "rstrip": false, "normalized": false, "special": true}], "normalizer": null, "pre_tokenizer": {"type": "Whitespace"},
  "post_processor": null, "decoder": null,
  "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 5, "[UNK]": 2}, "unk_token": "[UNK]"}}"#;

#[test]
fn a_tokenizer_json_is_read_with_its_end_of_text_and_without_its_truncation() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "tokenizer.json", WORDS);
    // The folder will do.
    let tokenizer = Tokenizer::open(&folder.path().display().to_string(), None, Path::new("no-cache")).unwrap();
    // Token 5 exists, so the vocabulary has six, whatever lies between.
    assert_eq!((tokenizer.vocab_size(), tokenizer.eod()), (6, Some(3)));
    assert_eq!(tokenizer.encode("a b c a").unwrap(), [0, 5, 2, 0]);
    assert!(tokenizer.decode(&[6]).unwrap_err().to_string().contains("token 6 is not in the vocabulary of 6"));
}

#[test]
fn the_configuration_beside_it_says_which_token_ends_a_document() {
    for config in [r#"{"eos_token": "b"}"#, r#"{"eos_token": {"content": "b"}}"#] {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "tokenizer.json", WORDS);
        write(folder.path(), "tokenizer_config.json", config);
        assert_eq!(Tokenizer::open(&path.display().to_string(), None, Path::new("no-cache")).unwrap().eod(), Some(5));
    }
}

/// Companions of another model, or none, may lie where a tokenizer is saved.
#[test]
fn a_saved_tokenizer_opens_as_the_same_with_its_end_of_a_document() {
    let chat = |eos: &str| format!(r#"{{"eos_token": {eos}, "chat_template": "hello"}}"#);
    let open = |folder: &Path| Tokenizer::open(&folder.display().to_string(), None, Path::new("no-cache")).unwrap();
    let none = WORDS.replace("</s>", "[SEP]");
    for (words, declared) in [
        (WORDS, None),
        (WORDS, Some(r#"{"eos_token": "b"}"#)),
        (WORDS, Some(r#"{"eos_token": {"content": "b"}}"#)),
        // One that the vocabulary does not have: documents have no end, though there is a well-known one.
        (WORDS, Some(r#"{"eos_token": "<|im_end|>"}"#)),
        (&none, None),
    ] {
        for there in [None, Some(chat("\"b\"")), Some(chat("\"</s>\"")), Some(chat("null")), Some("not json".into())] {
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
            let config = fs::read_to_string(to.path().join("tokenizer_config.json")).unwrap_or_default();
            // What is said there of other things stays.
            assert_eq!(config.contains("hello"), there.is_some_and(|there| there.contains("hello")), "{case}");
            tokenizer.save_into(to.path()).unwrap();
            assert_eq!(fs::read_to_string(to.path().join("tokenizer_config.json")).unwrap_or_default(), config);
        }
    }
}
