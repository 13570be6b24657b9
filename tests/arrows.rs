//! Checks that dependencies between folders point down: a folder uses only those below it.
//!
//! Each crate lists its folders from the bottom up. `crate::NAME` in a file's code, outside its
//! tests, is an arrow from the file's folder to NAME.

use std::fs;
use std::path::{Path, PathBuf};

/// Crates with their folders (or files) from the bottom up. Folders in one group do not use each
/// other.
const CRATES: [(&str, &[&[&str]]); 4] = [
    ("kernels", &[&["tensor"], &["cpu", "cuda"], &["ops"]]),
    (
        "megatron",
        &[
            &["error", "files", "private", "text"],
            &["comm"],
            &["params", "config"],
            &["topology", "checkpoint", "data", "context_parallel"],
            &["tensor_parallel"],
            &["pipeline"],
            &["data_parallel"],
            &["optim"],
            &["train"],
        ],
    ),
    ("models", &[&["bounds", "families", "gpt"], &["hf"], &["saved"], &["megatron_core"]]),
    (
        "tools",
        &[
            &["error", "report", "pictures"],
            &["fault"],
            &["launch"],
            &["ranks", "signals"],
            &["cli"],
            &["inference"],
            &["commands"],
            &["fuzz"],
        ],
    ),
];

/// Items of a crate's root, available to all its files.
const ROOT: [&str; 2] = ["lib", "main"];

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    let mut entries: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        match path.is_dir() {
            true if !path.ends_with("tests") => sources(&path, found),
            false
                if path.extension().is_some_and(|ext| ext == "rs")
                    && !path.ends_with("tests.rs") =>
            {
                found.push(path)
            }
            _ => {}
        }
    }
}

/// The code of a file, without comments and without the tests at its end.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// The names after `crate::` in `code`, also within braces, and the lines that contain them.
fn named(code: &str) -> Vec<(String, usize)> {
    let mut names = Vec::new();
    for (at, _) in code.match_indices("crate::") {
        let line = code[..at].matches('\n').count() + 1;
        let rest = &code[at + "crate::".len()..];
        match rest.strip_prefix('{') {
            None => names.push((word(rest), line)),
            Some(list) => {
                let (mut depth, mut start) = (0, 0);
                for (i, c) in list.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => {
                            names.push((word(&list[start..i]), line));
                            break;
                        }
                        '}' => depth -= 1,
                        ',' if depth == 0 => {
                            names.push((word(&list[start..i]), line));
                            start = i + 1;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    names
}

fn word(text: &str) -> String {
    text.trim_start().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The arrows of one file that do not point down.
fn wrong(folder: &str, text: &str, floors: &[&[&str]]) -> Vec<String> {
    let floor_of = |name: &str| floors.iter().position(|floor| floor.contains(&name));
    let own = floor_of(folder);
    let mut wrong = Vec::new();
    for (name, line) in named(&code(text)) {
        if let (Some(own), Some(there)) = (own, floor_of(&name))
            && name != folder
            && there >= own
        {
            wrong.push(format!("line {line}: {folder} may not use {name}"));
        }
    }
    wrong
}

#[test]
fn every_arrow_between_folders_points_down() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut all = Vec::new();
    for (name, floors) in CRATES {
        let source = root.join(name).join("src");
        let mut files = Vec::new();
        sources(&source, &mut files);
        for file in files {
            let inside = file.strip_prefix(&source).unwrap();
            let folder = inside.iter().next().unwrap().to_str().unwrap().trim_end_matches(".rs");
            let is_placed = floors.iter().any(|floor| floor.contains(&folder));
            assert!(
                is_placed || ROOT.contains(&folder),
                "{name}/src/{folder} has no floor: give it one in tests/arrows.rs"
            );
            let text = fs::read_to_string(&file).unwrap();
            all.extend(
                wrong(folder, &text, floors)
                    .into_iter()
                    .map(|what| format!("{name}/src/{}, {what}", inside.display())),
            );
        }
    }
    assert!(all.is_empty(), "arrows that do not point down:\n{}", all.join("\n"));
}

#[test]
fn an_arrow_that_points_up_is_seen() {
    let floors: &[&[&str]] = &[&["ground"], &["left", "right"], &["top"]];
    let up = "use crate::ground::a;\nuse crate::{Error, top::{b, c}, right};\n// crate::top\nfn f() { crate::top::g() }";
    let seen = wrong("left", up, floors);
    assert_eq!(seen.len(), 3, "{seen:?}");
    assert!(seen[0].starts_with("line 2: left may not use top"), "{seen:?}");
    assert!(wrong("top", up, floors).is_empty());
    assert!(
        wrong(
            "left",
            "use crate::left::a;\n#[cfg(test)]\nmod tests { use crate::top::b; }",
            floors
        )
        .is_empty()
    );
}
