use std::collections::BTreeSet;

use clap::CommandFactory;

use super::launchers::OTHER_LAUNCHERS;
use super::*;
use crate::cli::flags::sections;
use crate::cli::words::is_named;
use crate::commands::Cli;

/// Megatron-LM's names, as the file's first line says.
const NAMES: &str = include_str!("../../../tests/fixtures/megatron/flags.txt");

fn is_ours(name: &str) -> bool {
    sections().iter().any(|(_, args)| args.iter().any(|arg| is_named(arg, name)))
}

/// A flag's name, its values, and the other flags on the line.
type Case<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a [&'a str])]);

fn judge(name: &str, values: &[&str], line: &[(&str, &[&str])]) -> Verdict {
    let owned = |values: &[&str]| values.iter().map(|value| value.to_string()).collect::<Vec<_>>();
    let mut all = Line::default();
    line.iter().for_each(|(name, values)| all.add(name, &owned(values)));
    find(name).unwrap().judge(&owned(values), &all)
}

#[test]
fn every_name_of_megatron_lm_is_known() {
    let names: Vec<String> =
        NAMES.lines().filter(|line| line.starts_with("--")).map(with_dashes).collect();
    assert_eq!(names.len(), 991);
    let unknown: Vec<_> =
        names.iter().filter(|name| !is_ours(name) && find(name).is_none()).collect();
    assert!(unknown.is_empty(), "{unknown:?}");
}

#[test]
fn no_flag_of_ours_is_among_them() {
    for (_, args) in sections() {
        for arg in args {
            for name in arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default())
            {
                let name = with_dashes(name);
                // Names that begin with it may be documented instead.
                let exact = entries()
                    .any(|entry| entry.names.split_whitespace().any(|known| known == name));
                assert!(!exact, "{name} is a flag of this program: take it out of the table");
            }
        }
    }
}

#[test]
fn every_name_is_listed_once() {
    let mut seen = BTreeSet::new();
    for name in entries().flat_map(|entry| entry.names.split_whitespace()) {
        assert!(seen.insert(name), "{name}");
        assert_eq!(with_dashes(name), name);
    }
}

#[test]
fn names_of_other_programs_are_no_guesses() {
    let cases = [
        ("tp-size", "--tensor-model-parallel-size"),
        ("cpu-offload-params", "--offload-param cpu"),
        ("num-train-epochs", "--train-iters"),
        ("train-batch-size", "--global-batch-size"),
        ("partition-method", "--pipeline-partition"),
        ("cpu-offloading", "--offload-activations cpu"),
    ];
    for (name, instead) in cases {
        let Verdict::Refused(why) = judge(name, &[], &[]) else { panic!("{name}") };
        assert!(why.contains(instead), "{name}: {why}");
    }
}

#[test]
fn a_value_decides_where_only_some_change_nothing() {
    let passed_over: [Case<'_>; 12] = [
        ("spec", &["local"], &[]),
        ("rotary-percent", &["1.0"], &[("position-embedding-type", &["rope"])]),
        ("rotary-percent", &["0.5"], &[("position-embedding-type", &["learned_absolute"])]),
        ("main-grads-dtype", &["fp32"], &[]),
        ("no-bias-gelu-fusion", &[], &[("swiglu", &[])]),
        ("recompute-modules", &["core_attn"], &[("recompute-granularity", &["selective"])]),
        ("expert-tensor-parallel-size", &["4"], &[]),
        ("mtp-num-layers", &["0"], &[]),
        ("window-size", &["(-1,0)"], &[]),
        ("no-position-embedding", &[], &[("use-rotary-position-embeddings", &[])]),
        ("squared-relu", &["false"], &[]),
        ("add-bias-linear", &["true"], &[]),
    ];
    for (name, values, line) in passed_over {
        assert_eq!(judge(name, values, line), Verdict::PassedOver, "{name} {values:?}");
    }
    let refused: [Case<'_>; 12] = [
        ("spec", &["module", "function"], &[]),
        ("rotary-percent", &["0.5"], &[("position-embedding-type", &["rope"])]),
        ("main-grads-dtype", &["bf16"], &[]),
        ("no-bias-gelu-fusion", &[], &[("swiglu", &["false"])]),
        ("recompute-modules", &["[moe_act]"], &[("recompute-granularity", &["selective"])]),
        ("expert-tensor-parallel-size", &["4"], &[("num-experts", &["8"])]),
        ("mtp-num-layers", &["1"], &[]),
        ("window-size", &["128,128"], &[]),
        ("no-position-embedding", &[], &[]),
        ("squared-relu", &[], &[]),
        ("add-bias-linear", &["false"], &[]),
        ("rope-type", &["yarn"], &[]),
    ];
    for (name, values, line) in refused {
        assert!(matches!(judge(name, values, line), Verdict::Refused(_)), "{name} {values:?}");
    }
    let words: [(&str, &[&str], &str); 7] = [
        ("window-size", &["128,0"], "--sliding-window=129"),
        ("window-size", &["(128,", "0)"], "--sliding-window=129"),
        ("use-rotary-position-embeddings", &[], "--position-embedding-type=rope"),
        ("recompute-activations", &[], "--recompute-granularity=selective"),
        ("checkpoint-activations", &[], "--recompute-granularity=selective"),
        ("cpu-checkpointing", &[], "--offload-activations=cpu"),
        ("checkpoint-in-cpu", &[], "--offload-activations=cpu"),
    ];
    for (name, values, expected) in words {
        assert_eq!(
            judge(name, values, &[]),
            Verdict::Words(vec![expected.to_string()]),
            "{name} {values:?}"
        );
    }
}

/// The flags in the first column of the tables under `title` of a page of docs/reference, by
/// heading of the table's second column.
fn documented(page: &str, title: &str) -> Vec<(String, String)> {
    let path = format!("{}/../docs/reference/{page}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let part = text.split("## ").find(|part| part.starts_with(title)).unwrap();
    let mut heading = String::new();
    let mut flags = Vec::new();
    for cells in part
        .lines()
        .filter(|line| line.starts_with('|'))
        .map(|line| line.split('|').collect::<Vec<_>>())
    {
        if !cells[1].contains(['`', '-']) || cells[1].contains("Megatron-LM") {
            heading = cells[2].trim().to_string();
        }
        let names =
            cells[1].split('`').skip(1).step_by(2).filter_map(|name| name.split(' ').next());
        flags.extend(
            names
                .filter(|name| name.starts_with("--"))
                .map(|name| (heading.clone(), with_dashes(name))),
        );
    }
    flags
}

#[test]
fn the_documentation_says_the_same() {
    let flags = documented("from-megatron-lm.md", "Flags of other names");
    let of = |heading: &'static str| {
        flags.iter().filter(move |(known, _)| known.starts_with(heading)).map(|(_, name)| name)
    };
    assert!(of("ignored").count() > 20 && of("refused").count() > 15, "{flags:?}");
    for name in of("here") {
        assert!(is_ours(name) || find(name).is_some(), "{name}");
    }
    for name in of("ignored").filter(|name| !is_ours(name)) {
        let passed_over = |entry: &Entry| !matches!(entry.what, What::Refuse);
        let told = match name.strip_suffix('*') {
            Some(start) => entries().any(|e| {
                passed_over(e) && e.names.split_whitespace().any(|known| known.starts_with(start))
            }),
            None => find(name).is_some_and(passed_over),
        };
        assert!(told, "{name}");
    }
    for name in of("refused").filter(|name| !is_ours(name)) {
        assert!(find(name).is_some_and(|entry| !matches!(entry.what, What::LeaveOut)), "{name}");
    }
}

#[test]
fn the_documentation_tells_of_the_same_launchers() {
    let launch = Cli::command().find_subcommand("launch").unwrap().clone();
    let known = |flag: &str| launch.get_arguments().any(|arg| arg.get_long() == Some(flag));
    for (table, page) in OTHER_LAUNCHERS {
        let flags = documented(page, "Launchers");
        for (_, flag) in &flags {
            assert!(instead_of_launchers(flag).is_some() != known(flag), "{flag}");
        }
        for (names, _) in table {
            let told = |name: &&str| flags.iter().any(|(_, flag)| flag == *name);
            assert!(names.iter().all(told), "{page} does not list all of {names:?}");
        }
    }
}
