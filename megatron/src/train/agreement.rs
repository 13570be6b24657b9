//! Checks that all ranks were started with the same settings and read the same data.
//!
//! Ranks with different settings would deadlock in different operations, or train something that
//! nobody asked for.

use serde_json::{Map, Value};

use crate::comm::Group;
use crate::config::RunConfig;
use crate::text::printable;
use crate::{Error, Result};

/// Settings that may differ between machines: locations of files. The content of the data is
/// compared by its fingerprint instead.
const LOCAL: [&str; 9] = [
    "data.data_path",
    "data.tokenizer",
    "data.tokenizer_options.merge_file",
    "data.cache_dir",
    "logging.metrics",
    "logging.tensorboard.dir",
    "optimizer.offload.nvme",
    "parallel.param_offload.nvme",
    "training.activation_offload.nvme",
];

/// Succeeds if every rank of `world` has the same settings, data and program. Collective over
/// `world`.
///
/// # Errors
/// If they differ. Every rank returns the same error: each difference, with the values and the
/// ranks that have them.
pub fn require(world: &Group, config: &RunConfig, fingerprint: &str) -> Result<()> {
    if world.size() == 1 {
        return Ok(());
    }
    let unreadable = |e: serde_json::Error| {
        Error::comm(format!("cannot compare the settings of the ranks: {e}"))
    };
    let mut mine = Map::new();
    flatten("", &serde_json::to_value(config).map_err(unreadable)?, &mut mine);
    mine.retain(|key, _| !LOCAL.contains(&key.as_str()));
    mine.insert("the fingerprint of the data".into(), fingerprint.into());
    mine.insert("the program's version".into(), env!("CARGO_PKG_VERSION").into());
    let all = world.all_gather_bytes(&serde_json::to_vec(&mine).map_err(unreadable)?)?;
    let all: Vec<Map<String, Value>> = all
        .iter()
        .map(|bytes| serde_json::from_slice(bytes))
        .collect::<serde_json::Result<_>>()
        .map_err(unreadable)?;
    let differences = differences(&all);
    if differences.is_empty() {
        return Ok(());
    }
    Err(Error::config(format!(
        "the ranks were started differently: {}; start every rank with the same flags, run file and data",
        printable(differences.join("; "))
    )))
}

/// Collects the leaves of `value` under their dotted names. A list is one leaf.
fn flatten(name: &str, value: &Value, leaves: &mut Map<String, Value>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                flatten(
                    &if name.is_empty() { key.clone() } else { format!("{name}.{key}") },
                    value,
                    leaves,
                );
            }
        }
        leaf => {
            leaves.insert(name.to_string(), leaf.clone());
        }
    }
}

/// The settings that are not the same in all of `ranks`, as "KEY is A on rank 0 and B on ranks 1,
/// 2".
fn differences(ranks: &[Map<String, Value>]) -> Vec<String> {
    let mut keys: Vec<&String> = ranks.iter().flat_map(Map::keys).collect();
    keys.sort();
    keys.dedup();
    let mut differences = Vec::new();
    for key in keys {
        let mut values: Vec<(&Value, Vec<String>)> = Vec::new();
        for (rank, settings) in ranks.iter().enumerate() {
            let value = settings.get(key).unwrap_or(&Value::Null);
            match values.iter_mut().find(|(known, _)| *known == value) {
                Some((_, ranks)) => ranks.push(rank.to_string()),
                None => values.push((value, vec![rank.to_string()])),
            }
        }
        if values.len() > 1 {
            let stands = |(value, ranks): &(&Value, Vec<String>)| {
                format!(
                    "{value} on rank{} {}",
                    if ranks.len() > 1 { "s" } else { "" },
                    ranks.join(", ")
                )
            };
            let stands: Vec<String> = values.iter().map(stands).collect();
            differences.push(format!("{key} is {}", stands.join(" and ")));
        }
    }
    differences
}

#[cfg(test)]
mod tests {
    use std::thread;

    use serde_json::json;

    use super::*;
    use crate::comm::threads;
    use crate::config::{Offload, TensorboardConfig, valid};

    fn leaves(value: Value) -> Map<String, Value> {
        let mut leaves = Map::new();
        flatten("", &value, &mut leaves);
        leaves
    }

    #[test]
    fn every_difference_names_its_ranks() {
        let plain = leaves(json!({"model": {"num_layers": 4, "rope": [1, 2]}}));
        let other = leaves(json!({"model": {"num_layers": 6, "rope": [1, 2]}}));
        assert_eq!(
            differences(&[plain.clone(), plain.clone(), other]),
            ["model.num_layers is 4 on ranks 0, 1 and 6 on rank 2"]
        );
        assert!(differences(&[plain.clone(), plain]).is_empty());
    }

    #[test]
    fn a_setting_that_one_rank_lacks_is_a_difference() {
        let (with, without) = (leaves(json!({"a": 1, "b": "x"})), leaves(json!({"a": 1})));
        assert_eq!(differences(&[with, without]), ["b is \"x\" on rank 0 and null on rank 1"]);
    }

    #[test]
    fn machines_may_keep_things_in_other_folders_but_not_elsewhere() {
        let agree = |offloads: [Offload; 2]| {
            let ranks = threads::world(2).into_iter().zip(offloads).enumerate();
            thread::scope(|scope| {
                let ranks: Vec<_> = ranks
                    .map(|(rank, (world, offload))| {
                        let mut config = valid();
                        config.data.cache_dir = format!("cache-{rank}").into();
                        config.logging.tensorboard = Some(TensorboardConfig {
                            dir: format!("board-{rank}").into(),
                            log_interval: 1,
                            log_validation_ppl: false,
                            log_timers: false,
                            log_memory: false,
                        });
                        config.optimizer.offload = offload;
                        scope.spawn(move || require(&world, &config, "the same data"))
                    })
                    .collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Result<Vec<()>>>()
            })
        };
        let nvme = |folder: &str| Offload::Nvme(folder.into());
        agree([nvme("/disk0"), nvme("/disk1")]).unwrap();
        let refused = agree([nvme("/disk0"), Offload::None]).unwrap_err().to_string();
        assert!(
            refused.contains(
                "started differently: optimizer.offload is null on rank 0 and \"none\" on rank 1"
            ),
            "{refused}"
        );
    }
}
