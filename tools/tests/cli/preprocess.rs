//! `preprocess` and `tokenizer train`: files in, files out.

use std::fs;
use std::path::Path;

use crate::support::{megatron, stderr, stdout};

/// The output of Megatron 0.16.1 for these documents with bytes as tokens, 256 as the end of a
/// document, and `--append-eod`.
const LINES: &str = "{\"text\": \"ab\"}\n{\"text\": \"\"}\n{\"text\": [\"c\", \"\", \"d\\u00e9\"]}\n{\"text\": []}\n";
const BIN: &[u8] = &[0x61, 0, 0x62, 0, 0, 1, 0x63, 0, 0x64, 0, 0xc3, 0, 0xa9, 0, 0, 1];
const IDX: &[u8] = &[
    b'M', b'M', b'I', b'D', b'I', b'D', b'X', 0, 0, // magic
    1, 0, 0, 0, 0, 0, 0, 0, // version
    8, // u16
    3, 0, 0, 0, 0, 0, 0, 0, // sequences
    5, 0, 0, 0, 0, 0, 0, 0, // document entries
    3, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, // lengths
    0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, // byte offsets
    0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0,
    0, // document boundaries
    3, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0,
];

fn run(folder: &Path, words: &[&str]) -> (bool, String) {
    let output = megatron().current_dir(folder).args(words).output().unwrap();
    (output.status.success(), stdout(&output) + &stderr(&output))
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_files_are_megatrons_byte_for_byte() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.jsonl"), LINES).unwrap();
    let words = [
        "preprocess",
        "--input",
        "a.jsonl",
        "--tokenizer",
        "byte",
        "--append-eod",
        "--output-prefix",
        "out/x",
    ];
    let (ok, said) = run(folder.path(), &words);
    assert!(ok && said.contains("4 documents, 8 tokens"), "{said}");
    assert_eq!(names(&folder.path().join("out")), ["x_text_document.bin", "x_text_document.idx"]);
    assert_eq!(fs::read(folder.path().join("out/x_text_document.bin")).unwrap(), BIN);
    assert_eq!(fs::read(folder.path().join("out/x_text_document.idx")).unwrap(), IDX);
    // Some editors start files with a byte-order mark.
    fs::write(folder.path().join("a.jsonl"), [b"\xef\xbb\xbf", LINES.as_bytes()].concat()).unwrap();
    let (ok, said) = run(folder.path(), &[&words[..], &["--overwrite"]].concat());
    assert!(
        ok && fs::read(folder.path().join("out/x_text_document.bin")).unwrap() == BIN,
        "{said}"
    );
}

#[test]
fn workers_files_and_keys_change_no_token() {
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        format!("{{\"title\": \"t{i}\", \"text\": \"{}\"}}\n", "some words ".repeat(i % 50))
    };
    // More than a batch.
    let lines: Vec<String> = (0..30_000).map(line).collect();
    fs::write(folder.path().join("all.jsonl"), lines.concat()).unwrap();
    fs::write(folder.path().join("1.jsonl"), lines[..20_000].concat()).unwrap();
    fs::write(folder.path().join("2.jsonl"), lines[20_000..].concat()).unwrap();
    let common = ["--tokenizer", "byte", "--append-eod", "--output-prefix"];
    let (ok, said) = run(
        folder.path(),
        &[&["preprocess", "--input", "all.jsonl"], &common[..], &["a"]].concat(),
    );
    assert!(ok, "{said}");
    let input = [
        "preprocess",
        "--workers",
        "3",
        "--json-keys",
        "title",
        "text",
        "--input",
        "1.jsonl",
        "2.jsonl",
    ];
    let (ok, said) = run(folder.path(), &[&input[..], &common[..], &["b"]].concat());
    assert!(ok && said.contains("b_title_document: 30000 documents"), "{said}");
    for ending in ["bin", "idx"] {
        let read = |name: &str| {
            fs::read(folder.path().join(format!("{name}_text_document.{ending}"))).unwrap()
        };
        assert_eq!(read("a"), read("b"));
    }
}

#[test]
fn a_key_may_have_a_slash() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("a.jsonl"), "{\"meta/text\": \"some words\"}\n").unwrap();
    let input =
        ["preprocess", "--input", "a.jsonl", "--json-keys", "meta/text", "--tokenizer", "byte"];
    let (ok, said) = run(folder.path(), &[&input[..], &["--output-prefix", "new/x"]].concat());
    assert!(ok && folder.path().join("new/x_meta/text_document.bin").is_file(), "{said}");
}

#[test]
fn a_vocabulary_is_trained_used_and_trained_with() {
    let folder = tempfile::tempdir().unwrap();
    let text = "the cat sat on the mat, and the dog sat on the cat.\n\n".repeat(200);
    fs::write(folder.path().join("a.txt"), text).unwrap();
    let (ok, said) =
        run(folder.path(), &["tokenizer", "train", "--vocab-size", "300", "--input", "a.txt"]);
    assert!(ok && said.contains("tokenizer.json: 2"), "{said}");
    let words = ["preprocess", "--input", "a.txt", "--tokenizer", "tokenizer.json", "--append-eod"];
    let (ok, said) = run(folder.path(), &[&words[..], &["--output-prefix", "x"]].concat());
    assert!(ok && said.contains("1 documents"), "{said}");
    let model =
        ["pretrain", "--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2"];
    let sizes =
        ["--seq-length", "16", "--micro-batch-size", "1", "--train-iters", "2", "--lr", "1e-3"];
    let data = ["--dataloader-type", "single", "--tokenizer", "tokenizer.json", "--cache-dir", "c"];
    let ends = [
        "--eod-mask-loss",
        "--reset-position-ids",
        "--reset-attention-mask",
        "--sliding-window",
        "8",
    ];
    let blend =
        ["--eval-iters", "0", "--data-path", "0.5", "x_text_document", "0.5", "x_text_document"];
    let (ok, said) =
        run(folder.path(), &[&model[..], &sizes[..], &data[..], &ends[..], &blend[..]].concat());
    assert!(ok && said.contains("lm loss"), "{said}");
    // A split that leaves nothing to evaluate.
    let evaluated = [&["--split", "9999,1,0", "--eval-iters", "1"], &blend[2..]].concat();
    let (ok, said) = run(
        folder.path(),
        &[&model[..], &sizes[..], &data[..], &ends[..], &evaluated[..]].concat(),
    );
    assert!(
        ok && said.contains("nothing is evaluated on valid data: the part of x_text_document"),
        "{said}"
    );
}

#[test]
fn text_of_any_name_and_folders_are_read_as_training_reads_them() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::create_dir(root.join("docs")).unwrap();
    for name in ["README.md", "docs/a.md", "docs/b.rs"] {
        fs::write(root.join(name), "the cat sat on the mat.\n\n".repeat(50)).unwrap();
    }
    for (input, documents) in [("README.md", "1 documents"), ("docs", "2 documents")] {
        let output = ["--output-prefix", input, "--tokenizer", "byte"];
        let (ok, said) = run(root, &[&["preprocess", "--input", input], &output[..]].concat());
        assert!(ok && said.contains(documents), "{said}");
        let vocabulary =
            ["tokenizer", "train", "--vocab-size", "300", "--overwrite", "--input", input];
        let (ok, said) = run(root, &vocabulary);
        assert!(ok, "{said}");
    }
    let (ok, said) =
        run(root, &["tokenizer", "train", "--vocab-size", "300", "--input", "none.md"]);
    assert!(!ok && said.contains("none.md: does not exist"), "{said}");
    // The named end-of-document token does not exist.
    fs::write(root.join("tokenizer_config.json"), r#"{"eos_token": "<|new|>"}"#).unwrap();
    let words = [
        "preprocess",
        "--input",
        "docs",
        "--append-eod",
        "--tokenizer",
        "tokenizer.json",
        "--output-prefix",
        "x",
    ];
    let (ok, said) = run(root, &words);
    assert!(
        !ok && said
            .contains("tokenizer.json has no \"<|new|>\", but the file beside it names this token as eos_token"),
        "{said}"
    );
    assert!(said.contains("note: tokenizer.json lacks the special tokens \"<|new|>\""), "{said}");
}

#[test]
fn what_cannot_be_done_is_said_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::write(root.join("a.jsonl"), "{\"text\": \"a\"}\n{\"body\": \"b\"}\n").unwrap();
    fs::write(root.join("empty.jsonl"), "{\"text\": \"\"}\n").unwrap();
    fs::write(root.join("t.txt"), "text").unwrap();
    fs::write(root.join("p.parquet"), "PAR1").unwrap();
    fs::write(root.join("nan.jsonl"), "{\"score\": NaN, \"text\": \"a\"}\n").unwrap();
    fs::write(root.join("surrogate.jsonl"), "{\"text\": \"\\ud800\"}\n").unwrap();
    fs::write(root.join("half.jsonl"), "{\"text\": \"a\", \"b\": \"\"}\n").unwrap();
    fs::write(root.join("none"), "").unwrap();
    assert!(
        std::process::Command::new("mkfifo")
            .arg(root.join("pipe.jsonl"))
            .status()
            .unwrap()
            .success()
    );
    let before = names(root);
    let preprocess =
        |words: &[&str]| run(root, &[&["preprocess", "--output-prefix", "x"], words].concat());
    for (words, parts) in [
        (
            &["--tokenizer", "byte", "--input", "a.jsonl"][..],
            &["a.jsonl: line 2", "no key \"text\"", "body"][..],
        ),
        (
            &["--tokenizer", "byte", "--input", "p.parquet"],
            &["p.parquet", "not a complete Parquet file"],
        ),
        (&["--tokenizer", "byte", "--input", "none.txt"], &["none.txt: does not exist"]),
        (&["--tokenizer", "byte", "--input", "empty.jsonl"], &["x_text_document", "no text"]),
        (&["--tokenizer", "train:300", "--input", "t.txt"], &["megatron tokenizer train"]),
        (
            &["--tokenizer", "byte", "--input", "t.txt", "--json-keys", "a", "b"],
            &["t.txt", "without keys"],
        ),
        (
            &["--tokenizer", "byte", "--input", "t.txt", "--json-keys", "a", "a"],
            &["names \"a\" twice"],
        ),
        (
            &["--tokenizer", "byte", "--input", "nan.jsonl"],
            &["line 1, column 1", "NaN is not JSON", "null"],
        ),
        (
            &["--tokenizer", "byte", "--input", "surrogate.jsonl"],
            &["line 1", "half of a surrogate pair"],
        ),
        (&["--tokenizer", "byte", "--input", "pipe.jsonl"], &["pipe.jsonl", "a pipe or a device"]),
        // The dataset of one key does not stay without that of the other.
        (
            &["--tokenizer", "byte", "--input", "half.jsonl", "--json-keys", "text", "b"],
            &["x_b_document", "no text"],
        ),
    ] {
        let (ok, said) = preprocess(words);
        assert!(
            !ok && parts.iter().all(|part| said.contains(part)),
            "{said} lacks one of {parts:?}"
        );
        assert_eq!(names(root), before, "{words:?}");
    }
    let (ok, said) = run(root, &["tokenizer", "train", "--vocab-size", "200", "--input", "t.txt"]);
    assert!(!ok && said.contains("200 tokens is too small") && names(root) == before, "{said}");
    let (ok, said) = run(
        root,
        &["tokenizer", "train", "--vocab-size", "18446744073709551615", "--input", "t.txt"],
    );
    assert!(!ok && said.contains("too large to train") && names(root) == before, "{said}");
    let (ok, said) =
        run(root, &["tokenizer", "train", "--vocab-size", "300", "--input", "empty.jsonl"]);
    assert!(!ok && said.contains("no text") && names(root) == before, "{said}");
}

#[test]
fn nothing_is_replaced_unless_asked_for_and_no_input_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::write(root.join("t.txt"), "text\n\ntext").unwrap();
    let preprocess =
        ["preprocess", "--tokenizer", "byte", "--input", "t.txt", "--output-prefix", "x"];
    let train =
        ["tokenizer", "train", "--vocab-size", "300", "--input", "t.txt", "--output", "v.json"];
    for (words, file) in [(&preprocess[..], "x_text_document.idx"), (&train, "v.json")] {
        fs::write(root.join(file), "precious").unwrap();
        let (ok, said) = run(root, words);
        assert!(!ok && said.contains(file) && said.contains("--overwrite"), "{said}");
        assert_eq!(fs::read(root.join(file)).unwrap(), b"precious");
        let (ok, said) = run(root, &[words, &["--overwrite"]].concat());
        assert!(ok && fs::read(root.join(file)).unwrap() != b"precious", "{said}");
    }
    let (ok, said) = run(
        root,
        &[
            "tokenizer",
            "train",
            "--vocab-size=300",
            "--input=t.txt",
            "--output=t.txt",
            "--overwrite",
        ],
    );
    assert!(
        !ok && said.contains("is an input")
            && fs::read(root.join("t.txt")).unwrap().starts_with(b"text"),
        "{said}"
    );
}

/// The tokens of a dataset of 16 bits.
fn tokens(folder: &Path, prefix: &str) -> Vec<u16> {
    let bytes = fs::read(folder.join(format!("{prefix}_text_document.bin"))).unwrap();
    bytes.chunks_exact(2).map(|two| u16::from_le_bytes([two[0], two[1]])).collect()
}

fn tokenizer(name: &str) -> String {
    format!("{}/../tests/fixtures/tokenizers/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_text_has_the_same_tokens_in_a_text_file_and_in_json_lines() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let text =
        "Hello there.\n\nGeneral Kenobi.\n\n\n  the cat sat on the mat\r\n\r\nthen <s> they'll"
            .repeat(50);
    fs::write(root.join("two.txt"), &text).unwrap();
    fs::write(root.join("two.jsonl"), serde_json::json!({"text": text}).to_string()).unwrap();
    for name in ["gpt2", "llama3", "qwen2", "llama2", "mistral", "unigram", "t5", "bert"] {
        let flags = ["--tokenizer", &tokenizer(name), "--overwrite", "--output-prefix"];
        for file in ["two.txt", "two.jsonl"] {
            let (ok, said) =
                run(root, &[&["preprocess", "--input", file], &flags[..], &[file]].concat());
            assert!(ok, "{said}");
        }
        let (ids, expected) = (tokens(root, "two.txt"), tokens(root, "two.jsonl"));
        assert!(
            !ids.is_empty() && ids == expected,
            "{name}: {} and {} tokens",
            ids.len(),
            expected.len()
        );
    }
}

#[test]
fn a_document_has_what_its_tokenizer_puts_around_it_and_ends_once() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    fs::write(root.join("a.jsonl"), "{\"text\": \"the </s> cat\"}\n{\"text\": \"\"}\n").unwrap();
    let of = |name: &str, flags: &[&str]| {
        let words = [
            "preprocess",
            "--input=a.jsonl",
            "--overwrite",
            "--output-prefix=x",
            "--tokenizer",
            &tokenizer(name),
        ];
        let (ok, said) = run(root, &[&words[..], flags].concat());
        assert!(ok, "{said}");
        tokens(root, "x")
    };
    // <s> is 1, </s> is 2; unigram's </s> is 1, and the tokenizer itself adds it to every text.
    let (llama, ended) = (of("llama2", &[]), of("llama2", &["--append-eod"]));
    assert!(llama[0] == 1 && llama.ends_with(&[1]) && llama.contains(&2), "{llama:?}");
    assert!(ended.ends_with(&[2, 1, 2]) && ended.len() == llama.len() + 2, "{ended:?}");
    let bare = of("llama2", &["--tokenizer-hf-no-include-special-tokens", "--append-eod"]);
    assert_eq!([&[1][..], &bare, &[1, 2]].concat(), ended, "without text a document has no end");
    let literal = of("llama2", &["--split-special-tokens"]);
    assert!(literal[0] == 1 && !literal.contains(&2) && literal.len() > llama.len(), "{literal:?}");
    let unigram = of("unigram", &[]);
    assert!(
        unigram.ends_with(&[1, 1]) && unigram == of("unigram", &["--append-eod"]),
        "{unigram:?}"
    );
}

#[test]
fn gpt2s_vocabulary_and_merges_are_a_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let json: serde_json::Value =
        serde_json::from_slice(&fs::read(tokenizer("gpt2")).unwrap()).unwrap();
    fs::write(root.join("vocab.json"), json["model"]["vocab"].to_string()).unwrap();
    let merges = json["model"]["merges"].as_array().unwrap().iter();
    let merges: String = merges
        .map(|pair| format!("{} {}\n", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()))
        .collect();
    fs::write(root.join("merges.txt"), format!("#version: 0.2\n{merges}")).unwrap();
    fs::write(root.join("a.jsonl"), "{\"text\": \"Hello there.\\n\\nGeneral Kenobi\"}\n").unwrap();
    let of = |flags: &[&str]| {
        let words =
            ["preprocess", "--input=a.jsonl", "--append-eod", "--overwrite", "--output-prefix=x"];
        let (ok, said) = run(root, &[&words[..], flags].concat());
        assert!(ok, "{said}");
        tokens(root, "x")
    };
    let files = ["--vocab-file=vocab.json", "--merge-file=merges.txt"];
    let expected = of(&["--tokenizer", &tokenizer("gpt2")]);
    assert_eq!(of(&files), expected);
    assert_eq!(of(&[&files[..], &["--tokenizer-type=GPT2BPETokenizer"]].concat()), expected);
    assert_eq!(
        of(&["--tokenizer-type=HuggingFaceTokenizer", "--tokenizer-model", &tokenizer("gpt2")]),
        expected
    );
    // A model trained with them, and its output.
    fs::write(root.join("t.txt"), "Hello there.\n\nGeneral Kenobi.\n\n".repeat(50)).unwrap();
    let model = [
        "pretrain",
        "--num-layers=1",
        "--hidden-size=16",
        "--num-attention-heads=2",
        "--seq-length=16",
    ];
    let rest = [
        "--micro-batch-size=1",
        "--train-iters=1",
        "--lr=1e-3",
        "--data-path=t.txt",
        "--cache-dir=c",
        "--save=s",
    ];
    let (ok, said) = run(root, &[&model[..], &rest, &files, &["--eval-iters=0"]].concat());
    assert!(ok, "{said}");
    let (ok, said) = run(root, &["generate", "--load=s", "--prompt=Hello", "--num-tokens=4"]);
    assert!(ok && said.starts_with("Hello"), "{said}");
    let numbers = [
        "--tokenizer-type=NullTokenizer",
        "--vocab-size=400",
        "--data-path=x_text_document",
        "--save=n",
    ];
    let (ok, said) = run(
        root,
        &[&model[..], &rest[..3], &numbers, &["--split=100,0,0", "--seq-length=8"]].concat(),
    );
    assert!(ok && said.contains("vocabulary 401"), "{said}");
}
