//! The commands that the book shows are taken as they stand.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::parse;
use crate::cli::Stop;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// README and the pages of the book.
fn pages() -> Vec<PathBuf> {
    let mut pages = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    for folder in ["guide", "reference", "explanation", "contributing", "."] {
        let files = fs::read_dir(root().join("docs").join(folder)).unwrap();
        pages.extend(files.map(|file| file.unwrap().path()));
    }
    pages.retain(|page| page.extension().is_some_and(|it| it == "md"));
    pages
}

/// The lines of a page's fenced blocks of commands, those that go on joined.
fn lines(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let blocks = text.split("```").skip(1).step_by(2);
    let commands = blocks.filter_map(|block| {
        let (language, lines) = block.split_once('\n')?;
        ["", "sh", "bash"].contains(&language).then(|| lines.replace("\\\n", " "))
    });
    commands.flat_map(|lines| lines.lines().map(str::to_string).collect::<Vec<_>>()).collect()
}

/// The words of a line, as a shell has them; `None` of a line that starts none of `programs`.
fn words(line: &str, programs: &[&str]) -> Option<Vec<String>> {
    programs.iter().find(|program| line.starts_with(&format!("{program} ")))?;
    let alone = line.split([';', '|', '>', '<']).next().unwrap();
    let script = format!("set -- {alone}\nprintf '%s\\n' \"$@\"");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "no shell takes {line}");
    Some(String::from_utf8(output.stdout).unwrap().lines().map(str::to_string).collect())
}

/// A run file that is here, or one in its place.
fn here(word: &str, run_file: &Path) -> OsString {
    let shipped = root().join(word);
    match word.strip_suffix(".toml") {
        Some(_) if shipped.exists() => shipped.into(),
        Some(_) => run_file.into(),
        None => word.into(),
    }
}

#[test]
fn commands_of_the_book_are_taken() {
    const PROGRAMS: [&str; 6] =
        ["megatron", "target/release/megatron", "torchrun", "srun", "mpirun", "docker run"];
    let folder = tempfile::tempdir().unwrap();
    let run_file = folder.path().join("run.toml");
    fs::write(&run_file, "[model]\nnum_layers = 2\n").unwrap();
    let mut taken = 0;
    for page in pages() {
        for line in lines(&page) {
            let Some(words) = words(&line, &PROGRAMS) else { continue };
            for at in (0..words.len()).filter(|&at| words[at].ends_with("megatron")) {
                let command: Vec<OsString> =
                    words[at..].iter().map(|word| here(word, &run_file)).collect();
                match parse(&command) {
                    Ok(_) => taken += 1,
                    // Help.
                    Err(Stop::Clap(error)) if !error.use_stderr() => taken += 1,
                    Err(Stop::Clap(error)) => panic!("{}: {line}: {error}", page.display()),
                    Err(Stop::Error(error)) => panic!("{}: {line}: {error:?}", page.display()),
                }
            }
        }
    }
    assert!(taken > 50, "{taken} commands were found");
}
