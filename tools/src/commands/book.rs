//! Tests that the program accepts the commands in the book as written, and that the book's tables
//! of flags and pictures are up to date.

mod pictures;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Arg;

use super::{command, parse};
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

/// The lines of a page's fenced blocks of commands, with continued lines joined.
fn lines(page: &Path) -> Vec<String> {
    let text = fs::read_to_string(page).unwrap();
    let blocks = text.split("```").skip(1).step_by(2);
    let commands = blocks.filter_map(|block| {
        let (language, lines) = block.split_once('\n')?;
        ["", "sh", "bash"].contains(&language).then(|| lines.replace("\\\n", " "))
    });
    commands.flat_map(|lines| lines.lines().map(str::to_string).collect::<Vec<_>>()).collect()
}

/// The words of a line as a shell splits them; `None` if the line starts none of `programs`.
fn words(line: &str, programs: &[&str]) -> Option<Vec<String>> {
    programs.iter().find(|program| line.starts_with(&format!("{program} ")))?;
    let alone = line.split([';', '|', '>', '<']).next().unwrap();
    let script = format!("set -- {alone}\nprintf '%s\\n' \"$@\"");
    let output = Command::new("sh").args(["-c", &script]).output().unwrap();
    assert!(output.status.success(), "no shell takes {line}");
    Some(String::from_utf8(output.stdout).unwrap().lines().map(str::to_string).collect())
}

/// The named run file if it exists here, otherwise a substitute; likewise DeepSpeed's configuration.
fn here(word: &str, run_file: &Path) -> OsString {
    let shipped = root().join(word);
    if word == "ds_config.json" {
        return run_file.with_file_name(word).into();
    }
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
    fs::write(folder.path().join("ds_config.json"), "{}").unwrap();
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

/// A table row for a flag or an argument.
fn row(arg: &Arg) -> String {
    let name = match (arg.get_long(), arg.get_value_names()) {
        (Some(long), _) => format!("`--{long}`"),
        (None, Some([name, ..])) => format!("`{name}`"),
        (None, _) => format!("`{}`", arg.get_id()),
    };
    let possible = arg.get_possible_values();
    let value = if !arg.get_action().takes_values() || arg.get_long().is_none() {
        String::new()
    } else if possible.is_empty() {
        arg.get_value_names().unwrap_or_default().join(" ")
    } else {
        possible.iter().map(|value| value.get_name()).collect::<Vec<_>>().join(", ")
    };
    let default = arg.get_default_values().iter().map(|value| value.to_string_lossy());
    let default = default.collect::<Vec<_>>().join(" ");
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let cells = [name, value, default, help].map(|cell| cell.replace('|', "\\|"));
    format!("| {} |\n", cells.join(" | "))
}

/// A table of `args`, without the flags that every command has.
fn table<'a>(args: impl Iterator<Item = &'a Arg>) -> String {
    let shown = |arg: &&Arg| {
        !arg.is_hide_long_help_set()
            && !arg.is_hide_set()
            && !["help", "version"].contains(&arg.get_id().as_str())
    };
    let rows: String = args.filter(shown).map(row).collect();
    match rows.is_empty() {
        true => String::new(),
        false => format!("| flag | value | default | what it does |\n|---|---|---|---|\n{rows}"),
    }
}

/// The pages of flags in the book: name and text of each.
fn tables() -> Vec<(String, String)> {
    const MADE: &str = "This page is made from the table that `--help` is made from.";
    let mut command = command();
    command.build();
    let mut pages = Vec::new();
    let pretrain = command.find_subcommand("pretrain").unwrap();
    let mut headings: Vec<&str> =
        pretrain.get_arguments().filter_map(Arg::get_help_heading).collect();
    headings.dedup();
    for heading in headings {
        let topic = heading.split([':', ',']).next().unwrap();
        let args = pretrain.get_arguments().filter(|arg| arg.get_help_heading() == Some(heading));
        let text = format!(
            "# Flags of pretrain: {}\n\n{heading}.\n{MADE}\n\n{}",
            topic.to_lowercase(),
            table(args)
        );
        pages.push((topic.to_lowercase().replace(' ', "-"), text));
    }
    let mut text = format!("# Flags of the other commands\n\n{MADE}\n");
    let mut open: Vec<(String, &clap::Command)> = command
        .get_subcommands()
        .filter(|it| !["help", "pretrain"].contains(&it.get_name()))
        .map(|it| (it.get_name().to_string(), it))
        .collect();
    open.reverse();
    while let Some((name, command)) = open.pop() {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let table = table(command.get_arguments());
        if !table.is_empty() {
            text += &format!("\n## `megatron {name}`\n\n{about}.\n\n{table}");
        }
        let inner = command.get_subcommands().filter(|it| it.get_name() != "help");
        let inner: Vec<_> = inner.map(|it| (format!("{name} {}", it.get_name()), it)).collect();
        open.extend(inner.into_iter().rev());
    }
    pages.push(("commands".to_string(), text));
    pages
}

/// With `UPDATE_BOOK=1`, writes the pages instead of comparing them.
#[test]
fn tables_of_flags_are_those_of_help() {
    let folder = root().join("docs/reference/flags");
    for (name, text) in tables() {
        let path = folder.join(format!("{name}.md"));
        if std::env::var_os("UPDATE_BOOK").is_some() {
            fs::create_dir_all(&folder).unwrap();
            fs::write(&path, &text).unwrap();
        }
        let there = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            there == text,
            "{} is out of date: run this test with UPDATE_BOOK=1",
            path.display()
        );
    }
}
