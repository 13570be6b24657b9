//! Fuzzes parsers; see `run`.

mod coverage;
mod engine;
mod memory;
mod mutate;
mod targets;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

const USAGE: &str =
    "usage: fuzz [--seconds N] [--seed N] [--current FILE] [--keep FOLDER] [TARGET...]";

fn main() -> ExitCode {
    let (mut seconds, mut seed, mut names) = (3.0, 1, Vec::new());
    // The file of the current input, in case the process dies, and the folder for inputs that broke
    // the rule.
    let (mut current, mut keep) = (std::env::temp_dir().join("fuzz.input"), std::env::temp_dir());
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_else(|| fail(USAGE));
        match word.as_str() {
            "--seconds" => {
                seconds = value().parse().unwrap_or_else(|_| fail("--seconds: not a number"))
            }
            "--seed" => {
                seed = value().parse().unwrap_or_else(|_| fail("--seed: not a whole number"))
            }
            "--current" => current = PathBuf::from(value()),
            "--keep" => keep = PathBuf::from(value()),
            option if option.starts_with('-') => fail(USAGE),
            _ => names.push(word),
        }
    }
    let targets = targets::all();
    if let Some(name) =
        names.iter().find(|name| !targets.iter().any(|target| target.name == **name))
    {
        let known: Vec<_> = targets.iter().map(|target| target.name).collect();
        fail(&format!("no target is called {name}; there are {}", known.join(", ")));
    }
    let mut failed = false;
    for target in targets
        .iter()
        .filter(|target| names.is_empty() || names.iter().any(|name| name == target.name))
    {
        match engine::fuzz(target, Duration::from_secs_f64(seconds), seed, &current) {
            Ok(report) => {
                let engine::Report { runs, inputs, edges } = report;
                println!(
                    "{:16} {runs:8} runs, {inputs:5} inputs kept, {edges:6} edges",
                    target.name
                );
            }
            Err((input, why)) => {
                let file = keep.join(format!("{}.input", target.name));
                if let Err(error) = std::fs::write(&file, input) {
                    eprintln!("{}: {error}", file.display());
                }
                println!("{:16} {why}; the input is {}", target.name, file.display());
                failed = true;
            }
        }
    }
    ExitCode::from(u8::from(failed))
}

fn fail(message: &str) -> ! {
    eprintln!("{message}");
    std::process::exit(2)
}
