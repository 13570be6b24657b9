//! Tests of text: which files are read, and how they are cut.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::write;
use crate::Error;
use crate::data::{Corpus, Part, SplitPoints};

fn scan(path: impl Into<PathBuf>) -> crate::Result<Corpus> {
    Corpus::scan(&[path.into()], Path::new("no-cache"))
}

fn message(path: impl Into<PathBuf>) -> String {
    scan(path).unwrap_err().to_string()
}

/// If tokens are bytes, paragraphs are cut at their ends.
fn bytes() -> Arc<SplitPoints> {
    Arc::new(SplitPoints::anywhere())
}

fn paragraphs(content: &str) -> Vec<Part> {
    let folder = tempfile::tempdir().unwrap();
    let corpus = scan(write(folder.path(), "x.txt", content)).unwrap();
    corpus.parts(bytes()).map(Result::unwrap).collect()
}

fn texts(content: &str) -> Vec<String> {
    paragraphs(content).into_iter().map(|paragraph| paragraph.text).collect()
}

/// Paths of the documents below `folder`.
fn found(corpus: &Corpus, folder: &Path) -> Vec<String> {
    let relative = |file: &PathBuf| file.strip_prefix(folder).unwrap().display().to_string();
    corpus.files().iter().map(relative).collect()
}

#[test]
fn paragraphs_end_after_blank_lines() {
    assert_eq!(texts("a\nb\n\nc\n"), ["a\nb\n\n", "c\n"]);
    assert_eq!(texts("a\n \t\r\n\n\nb"), ["a\n \t\r\n\n\n", "b"]);
    assert_eq!(texts("\n\na\n\n"), ["\n\na\n\n"]);
    assert_eq!(texts("\n\n"), ["\n\n"]);
}

#[test]
fn paragraphs_laid_end_to_end_are_the_file() {
    let long = "a line of a paragraph that never ends\n".repeat(10_000);
    for content in
        ["x", "x\n", "\n", "a\n\n\nb\n\nc", "ü\r\n\r\nß\r\n", "\n\n\n a \n\n \n\nb", &long]
    {
        assert_eq!(texts(content).concat(), content);
        let last: Vec<bool> =
            paragraphs(content).iter().rev().map(|paragraph| paragraph.last).collect();
        assert!(
            last[0] && !last[1..].contains(&true),
            "only the last one is the last: {content:?}"
        );
    }
}

#[test]
fn text_without_blank_lines_is_cut_at_ends_of_lines() {
    let parts = texts(&"a line of a paragraph that never ends\n".repeat(10_000));
    assert!(
        parts.len() > 3 && parts.iter().all(|part| part.ends_with('\n') && part.len() < 70_000)
    );
}

#[test]
fn folders_are_read_in_the_order_of_names_without_what_is_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for name in ["b/z.md", "b/a.rs", "a.txt", "c/d/e.TOML", "b.txt"] {
        write(root, name, "text");
    }
    for name in [
        ".hidden.txt",
        ".git/x.txt",
        "target/x.rs",
        "c/target/x.rs",
        "x.json",
        "x",
        "x.png",
        "cache/x.txt",
    ] {
        write(root, name, "no text");
    }
    write(root, "nul.txt", b"a\0b");
    write(root, "latin1.txt", b"gr\xfc\xdfe");
    write(root, "cut.txt", b"gr\xc3");
    write(root, "empty.txt", "");
    write(root, "run/latest_checkpointed_iteration.txt", "10");
    write(root, "run/notes.txt", "no text");
    let corpus = Corpus::scan(&[root.to_path_buf()], &root.join("cache")).unwrap();
    assert_eq!(found(&corpus, root), ["a.txt", "b/a.rs", "b/z.md", "b.txt", "c/d/e.TOML"]);
    assert_eq!(corpus.num_bytes(), 20);
}

#[test]
fn loops_of_links_end() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "a/x.txt", "text");
    std::os::unix::fs::symlink(folder.path(), folder.path().join("a/up")).unwrap();
    std::os::unix::fs::symlink("nowhere.txt", folder.path().join("dangling.txt")).unwrap();
    std::os::unix::fs::symlink("self.txt", folder.path().join("self.txt")).unwrap();
    assert_eq!(found(&scan(folder.path()).unwrap(), folder.path()), ["a/x.txt"]);
}

#[test]
fn a_character_across_the_ends_of_reads_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    for shift in 0..4 {
        let content = "x".repeat(shift) + &"𝄞".repeat(200_000);
        let corpus = scan(write(folder.path(), "x.txt", &content)).unwrap();
        assert_eq!(corpus.num_bytes(), content.len() as u64);
    }
}

#[test]
fn a_file_named_by_itself_may_have_any_extension() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(scan(write(folder.path(), "x.json", "{}")).unwrap().files().len(), 1);
    // Except a file that certainly holds something else.
    let message = scan(write(folder.path(), "x.jsonl", "{\"text\": \"words\"}\n"))
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(message.contains("x.jsonl") && message.contains("megatron preprocess"), "{message}");
}

#[test]
fn what_is_no_text_is_an_error_with_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name, content: &[u8]| message(write(folder.path(), name, content));
    assert!(file("e.txt", b"").contains("e.txt: is empty"));
    assert!(file("n.txt", b"ab\0").contains("n.txt: is not text: byte 2 is NUL"));
    assert!(file("u.txt", b"abc\xff").contains("u.txt: is not text: byte 3 is not UTF-8"));
    assert!(file("c.txt", b"ab\xc3").contains("byte 2 is not UTF-8"));
    let empty = tempfile::tempdir().unwrap();
    let told = message(empty.path());
    assert!(
        told.contains(&empty.path().display().to_string()) && told.contains("holds no text"),
        "{told}"
    );
    assert!(matches!(scan("no/such/file"), Err(Error::Io { .. })));
}

#[test]
fn text_that_changes_while_it_is_read_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = write(folder.path(), "x.txt", "one\n\ntwo");
    let corpus = scan(&path).unwrap();
    for content in ["one\n\nTWO", "one", ""] {
        std::fs::write(&path, content).unwrap();
        let last = corpus.parts(bytes()).last().unwrap();
        assert!(
            last.unwrap_err().to_string().contains("x.txt: changed while it was read"),
            "{content:?}"
        );
    }
    std::fs::write(&path, "one\n\ntwo").unwrap();
    assert!(corpus.parts(bytes()).all(|paragraph| paragraph.is_ok()));
}

#[test]
fn a_path_given_twice_is_read_twice() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "x.txt", "text");
    let twice = [folder.path().to_path_buf(), folder.path().to_path_buf()];
    assert_eq!(Corpus::scan(&twice, Path::new("no-cache")).unwrap().files().len(), 2);
}

#[test]
fn the_key_depends_on_content_and_where_files_end_alone() {
    let folder = tempfile::tempdir().unwrap();
    let key = |name: &str, files: &[&str]| {
        let root = folder.path().join(name);
        for (i, content) in files.iter().enumerate() {
            write(&root, &format!("{i}.txt"), content);
        }
        scan(root).unwrap().key().to_owned()
    };
    assert_eq!(key("a", &["ab", "c"]), key("b", &["ab", "c"]));
    assert_ne!(key("c", &["a", "bc"]), key("d", &["ab", "c"]));
    assert_ne!(key("e", &["ab", "c"]), key("f", &["ab", "d"]));
}
