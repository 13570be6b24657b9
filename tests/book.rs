//! The book can be read: pages are short, sentences too, and links lead somewhere.

use std::fs;
use std::path::{Path, PathBuf};

/// Words of all pages, of one page, and of a sentence in the mean; tables of flags are made by
/// `tools/src/commands/book.rs` and may be longer.
const MOST: [usize; 3] = [25_000, 1_500, 18];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The pages of `folder` and below it.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let mut pages = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => pages.extend(self::pages(&path)),
            false if path.extension().is_some_and(|it| it == "md") => pages.push(path),
            false => (),
        }
    }
    pages.sort();
    pages
}

/// A page without its fenced blocks.
fn prose(text: &str) -> String {
    text.split("```").step_by(2).collect()
}

fn is_word(word: &&str) -> bool {
    word.chars().any(char::is_alphanumeric)
}

/// Words of each sentence. A list's item is one at least; tables and headings are none.
fn sentences(prose: &str) -> Vec<usize> {
    let mut lengths = vec![0];
    for line in prose.lines() {
        let line = line.trim_start();
        if line.is_empty() || line.starts_with(['|', '#', '-', '<', '!']) || is_numbered(line) {
            lengths.push(0);
        }
        if line.starts_with(['|', '#', '<', '!']) {
            continue;
        }
        for word in line.split_whitespace().filter(is_word) {
            *lengths.last_mut().unwrap() += 1;
            if word.ends_with(['.', '!', '?', ':']) {
                lengths.push(0);
            }
        }
    }
    lengths.retain(|&length| length > 1);
    lengths
}

fn is_numbered(line: &str) -> bool {
    line.split_once(". ").is_some_and(|(number, _)| number.parse::<usize>().is_ok())
}

#[test]
fn pages_are_short_and_so_are_their_sentences() {
    let [most_in_all, most_of_a_page, mean] = MOST;
    let too_wide = |line: &&str| line.chars().count() > 100 && !line.starts_with('|');
    let mut all = 0;
    let written = |page: &PathBuf| !page.parent().unwrap().ends_with("reference/flags");
    for page in pages(&root().join("docs")).into_iter().filter(written) {
        let prose = prose(&fs::read_to_string(&page).unwrap());
        let wide = prose.lines().find(too_wide);
        assert!(wide.is_none(), "{}: {wide:?}", page.display());
        let words = prose.split_whitespace().filter(is_word).count();
        assert!(words <= most_of_a_page, "{}: {words} words", page.display());
        all += words;
        let sentences = sentences(&prose);
        let of_sentences: usize = sentences.iter().sum();
        assert!(
            of_sentences <= mean * sentences.len(),
            "{}: {of_sentences} words in {} sentences",
            page.display(),
            sentences.len()
        );
    }
    assert!(all <= most_in_all, "{all} words");
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    assert!(readme.lines().count() < 120, "README.md");
}

#[test]
fn every_page_is_in_the_table_of_contents() {
    let docs = root().join("docs");
    let summary = fs::read_to_string(docs.join("SUMMARY.md")).unwrap();
    for page in pages(&docs) {
        let name = page.strip_prefix(&docs).unwrap().display().to_string();
        assert!(name == "SUMMARY.md" || summary.contains(&format!("({name})")), "{name}");
    }
}

/// What a link to a heading ends with: `## A step's end` has `a-steps-end`.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
    heading.trim().to_lowercase().chars().filter(kept).collect::<String>().replace(' ', "-")
}

#[test]
fn links_lead_to_files_and_headings() {
    let more = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root().join(name));
    for page in pages(&root().join("docs")).into_iter().chain(more) {
        let text = prose(&fs::read_to_string(&page).unwrap());
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let to = match file {
                "" => page.clone(),
                file => page.with_file_name(file),
            };
            assert!(to.exists(), "{} links to {link}", page.display());
            if heading.is_empty() {
                continue;
            }
            let there = fs::read_to_string(&to).unwrap();
            let mut headings = there.lines().filter(|line| line.starts_with('#'));
            assert!(
                headings.any(|line| anchor(line.trim_start_matches('#')) == heading),
                "{} links to {link}, a heading that is not there",
                page.display()
            );
        }
    }
}
