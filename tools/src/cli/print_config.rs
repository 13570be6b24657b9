//! Writes settings as a run file, with where each comes from.

use std::collections::BTreeMap;

use clap::Arg;

use super::flags::{has_type, sections};
use super::{Gathered, Resolved};
use crate::error::Result;

/// One key of a run file that is written.
pub struct Line {
    pub key: String,
    /// The words of a command line, as a flag takes them.
    pub values: Vec<String>,
    pub origin: String,
    /// Whether it is a comment, because it holds without being said.
    pub is_comment: bool,
}

/// The text of a run file with `lines`, in the sections and the order of `--help`. Keys of no
/// section are left out.
pub fn text_of(lines: Vec<Line>) -> String {
    let mut by_key: BTreeMap<String, Line> =
        lines.into_iter().map(|line| (line.key.clone(), line)).collect();
    let mut text = String::new();
    for (name, args) in sections() {
        let of_section =
            args.iter().filter_map(|arg| Some((arg, by_key.remove(arg.get_id().as_str())?)));
        let written: Vec<String> = of_section.map(|(arg, line)| written(arg, &line)).collect();
        if !written.is_empty() {
            let gap = if text.is_empty() { "" } else { "\n" };
            text.push_str(&format!("{gap}[{name}]\n{}", written.concat()));
        }
    }
    text
}

fn written(arg: &Arg, line: &Line) -> String {
    let mark = if line.is_comment { "# " } else { "" };
    format!("{mark}{} = {}  # {}\n", line.key, value(arg, &line.values), line.origin)
}

/// The values of a flag as TOML.
fn value(arg: &Arg, values: &[String]) -> String {
    let is_plain = has_type::<bool>(arg)
        || has_type::<usize>(arg)
        || has_type::<u64>(arg)
        || has_type::<i64>(arg)
        || has_type::<f64>(arg);
    let one = |value: &String| {
        // TOML has no number that begins or ends with a point.
        let is_number =
            |value: &str| toml::from_str::<toml::Table>(&format!("x = {value}")).is_ok();
        match is_plain {
            true if is_number(value) => value.clone(),
            true => value.parse::<f64>().map_or_else(|_| value.clone(), |x| format!("{x:?}")),
            false => super::from_checkpoint::quoted(value),
        }
    };
    let is_list = matches!(arg.get_action(), clap::ArgAction::Append)
        || arg.get_num_args().is_some_and(|number| number.max_values() > 1);
    match values {
        [value] if !is_list => one(value),
        values => format!("[{}]", values.iter().map(one).collect::<Vec<_>>().join(", ")),
    }
}

/// The whole run file of `gathered`, which makes the run `resolved`. What is not given is a comment,
/// with its default or how it follows from others.
///
/// # Errors
/// None that the settings have not had before.
pub fn of_run(gathered: &Gathered, resolved: &Resolved) -> Result<String> {
    let matches = gathered.print_config.clone().unwrap_or_default();
    let mut lines = Vec::new();
    for arg in sections().into_iter().flat_map(|(_, args)| args) {
        let key = arg.get_id().to_string();
        let raw = matches.get_raw(&key).into_iter().flatten();
        let values: Vec<String> = raw.map(|word| word.to_string_lossy().into_owned()).collect();
        let given = gathered.origins.get(&key);
        if !values.is_empty() && !arg.is_hide_set() {
            let origin = given.cloned().unwrap_or_else(|| "default".to_string());
            lines.push(Line { key, values, origin, is_comment: given.is_none() });
        }
    }
    let said = |key: &str| lines.iter().any(|line: &Line| line.key == key && !line.is_comment);
    let (m, t, p) = (&resolved.run.model, &resolved.run.training, &resolved.run.parallel);
    let derived = [
        ("ffn_hidden_size", m.ffn_hidden_size),
        ("num_query_groups", m.num_query_groups),
        ("kv_channels", m.head_dim),
        ("max_position_embeddings", m.max_position_embeddings),
        ("data_parallel_size", p.data_parallel_size),
        ("zero_stage", usize::from(p.zero_stage)),
        ("micro_batch_size", t.micro_batch_size),
        ("global_batch_size", t.global_batch_size),
    ];
    let derived: Vec<Line> = derived
        .into_iter()
        .filter(|(key, _)| !said(key))
        .map(|(key, value)| Line {
            key: key.to_string(),
            values: vec![value.to_string()],
            origin: resolved.origins.of(key).unwrap_or("default").to_string(),
            is_comment: true,
        })
        .collect();
    lines.extend(derived);
    Ok(text_of(lines))
}
