//! Compares a resumed run's settings with those of the run that wrote the checkpoint. Each
//! difference gives a note with both values.
//!
//! A checkpoint records the settings of its run. Settings that an older checkpoint lacks are not
//! compared. For the learning rate, its schedule and the weight decay this follows Megatron-LM's
//! `OptimizerParamScheduler._check_and_set`, but Megatron-LM ends the run where this code writes a
//! note.

use serde_json::{Map, Value, json};

use super::progress::Progress;
use super::state::{is_of_schedule, same, setting_of, with_schedule};
use crate::config::parse_split;
use crate::config::{DataloaderType, DecayStyle, OptimizerKind, RunConfig, SchedulerOf};
use crate::optim::LrSchedule;

/// A note for each setting of `ours` that differs from the setting in a checkpoint's `state` and
/// affects training after `progress`.
///
/// # Errors
/// If the settings cannot be expressed in JSON.
pub fn changed(
    state: &Value,
    ours: &RunConfig,
    progress: &Progress,
) -> serde_json::Result<Vec<String>> {
    let Some(theirs) = state.get("config") else { return Ok(Vec::new()) };
    let pair = Pair { theirs, ours: &serde_json::to_value(ours)? };
    let (mut notes, schedule) = match ours.checkpoint.scheduler {
        SchedulerOf::RunNoted => (length_and_batch(&pair, ours), schedule_notes(&pair)),
        SchedulerOf::Run => (batch(&pair), overriding_lines(&pair)),
        SchedulerOf::Checkpoint => (batch(&pair), taken_lines(&pair)),
    };
    let is_noted = notes.iter().any(|note| note.contains("learning rate")) || !schedule.is_empty();
    notes.extend(schedule);
    if is_noted && ours.checkpoint.scheduler == SchedulerOf::RunNoted {
        notes.extend(next_rate(&pair, ours, progress));
    }
    notes.extend(order_of_samples(&pair, ours));
    notes.extend(data_and_model(&pair, ours, progress));
    notes.extend(update_rule(&pair, ours.optimizer.kind));
    Ok(notes)
}

/// The settings of the checkpoint's run (`theirs`) and of this run (`ours`).
struct Pair<'a> {
    theirs: &'a Value,
    ours: &'a Value,
}

impl Pair<'_> {
    /// Both values, theirs first, if they differ.
    fn at(&self, pointer: &str) -> Option<(&Value, &Value)> {
        let (theirs, ours) = (self.theirs.pointer(pointer)?, self.ours.pointer(pointer)?);
        (!same(theirs, ours)).then_some((theirs, ours))
    }

    fn note(&self, pointer: &str, key: &str, consequence: &str) -> Option<String> {
        let (theirs, ours) = self.at(pointer)?;
        Some(format!(
            "note: {key} is {} here and {} in the checkpoint{consequence}",
            show(ours),
            show(theirs)
        ))
    }

    fn number(&self, of: &Value, pointer: &str) -> Option<u64> {
        of.pointer(pointer)?.as_u64()
    }

    /// Whether a setting has this value in either run.
    fn either(&self, pointer: &str, value: &Value) -> bool {
        [self.theirs, self.ours].iter().any(|run| run.pointer(pointer) == Some(value))
    }

    /// The schedule settings that differ and matter, with the names of their flags.
    fn schedule(&self) -> Vec<(&str, &Value, &Value)> {
        let keys =
            self.ours.get("optimizer").and_then(Value::as_object).into_iter().flat_map(Map::keys);
        let differing = keys.filter(|key| is_of_schedule(key) && self.counts(key));
        let of_optimizer = differing
            .filter_map(|key| self.at(&format!("/optimizer/{key}")).map(|(a, b)| (flag(key), a, b)))
            .collect();
        [of_optimizer, self.lr_schedule()].concat()
    }

    /// The differences of two schedules of DeepSpeed: their types, or the settings of one type.
    fn lr_schedule(&self) -> Vec<(&str, &Value, &Value)> {
        let [theirs, ours] = [self.theirs, self.ours].map(lr_schedule_of);
        match (theirs, ours) {
            (Value::Object(a), Value::Object(b)) if a.get("type") == b.get("type") => {
                let pairs = b.iter().filter_map(|(key, b)| Some((key.as_str(), a.get(key)?, b)));
                pairs.filter(|(_, a, b)| !same(a, b)).collect()
            }
            (a, b) if same(a, b) => Vec::new(),
            (a, b) => vec![("lr_schedule", a, b)],
        }
    }

    /// Whether a schedule setting has an effect.
    fn counts(&self, key: &str) -> bool {
        let style = |style: DecayStyle| json!(style);
        let types = [self.theirs, self.ours].map(|run| lr_schedule_of(run).get("type"));
        match key {
            // Compared in parts.
            "lr_schedule" => false,
            "lr" if types != [None, None] => {
                types.into_iter().flatten().any(|name| name == "WarmupCosineLR")
            }
            "min_lr" | "decay_style" | "decay_samples" | "warmup_samples" | "warmup_init"
            | "wsd_decay_samples" | "wsd_decay_style"
                if types != [None, None] =>
            {
                false
            }
            "min_lr" | "decay_samples" => [self.theirs, self.ours].iter().any(|run| {
                run.pointer("/optimizer/decay_style") != Some(&style(DecayStyle::Constant))
            }),
            key if key.starts_with("wsd") => {
                self.either("/optimizer/decay_style", &style(DecayStyle::Wsd))
            }
            _ => true,
        }
    }
}

/// DeepSpeed's schedule of a run, or null.
fn lr_schedule_of(run: &Value) -> &Value {
    let optimizer = run.get("optimizer").and_then(Value::as_object);
    optimizer.and_then(|optimizer| setting_of(optimizer, "lr_schedule")).unwrap_or(&Value::Null)
}

/// The flag of a schedule setting.
fn flag(key: &str) -> &str {
    match key {
        "decay_style" => "lr_decay_style",
        "decay_samples" => "lr_decay_samples",
        "warmup_samples" => "lr_warmup_samples",
        "wsd_decay_samples" => "lr_wsd_decay_samples",
        "wsd_decay_style" => "lr_wsd_decay_style",
        "warmup_init" => "lr_warmup_init",
        "weight_decay_increase" => "weight_decay_incr_style",
        // For other settings the flag has the same name.
        key => key,
    }
}

fn show(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "none".into(),
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| format!("{key} {}", show(value)))
            .collect::<Vec<_>>()
            .join(", "),
        other => other.to_string(),
    }
}

/// Lengths of the schedule. By default they follow from the run's length and batch size.
const LENGTHS: [(&str, &str); 3] = [
    ("decay_samples", "the learning rate's decay ends after"),
    ("warmup_samples", "the learning rate's warm-up ends after"),
    ("wsd_decay_samples", "the learning rate's annealing lasts"),
];

/// Notes on the run's length and batch size, with their effects on the schedule. A different length
/// is noted only if it has such an effect.
fn length_and_batch(pair: &Pair<'_>, ours: &RunConfig) -> Vec<String> {
    let mut lengths = Vec::new();
    for (key, what) in LENGTHS.iter().filter(|(key, _)| pair.counts(key)) {
        if let Some((theirs, ours)) = pair.at(&format!("/optimizer/{key}")) {
            lengths.push(format!("{what} {} samples, not {}", show(ours), show(theirs)));
        }
    }
    let in_samples = ours.training.train_samples.is_some();
    let length = if in_samples { "train_samples" } else { "train_iters" };
    let pointer = format!("/training/{length}");
    let mut notes = Vec::new();
    if !lengths.is_empty()
        && let Some(note) = pair.note(&pointer, length, &format!(": {}", lengths.join(", ")))
    {
        notes.push(note);
        lengths.clear();
    }
    for (pointer, key) in BATCH {
        let consequence =
            if lengths.is_empty() { String::new() } else { format!(": {}", lengths.join(", ")) };
        if let Some(note) = pair.note(pointer, key, &consequence) {
            notes.push(note);
            lengths.clear();
        }
    }
    // These lengths were set explicitly.
    notes.extend(lengths.into_iter().map(|length| format!("note: {length} as in the checkpoint")));
    notes
}

const BATCH: [(&str, &str); 2] = [
    ("/training/global_batch_size", "global_batch_size"),
    ("/training/rampup", "rampup_batch_size"),
];

fn batch(pair: &Pair<'_>) -> Vec<String> {
    BATCH.into_iter().filter_map(|(pointer, key)| pair.note(pointer, key, "")).collect()
}

/// A note for each schedule setting except the lengths.
fn schedule_notes(pair: &Pair<'_>) -> Vec<String> {
    let lengths = LENGTHS.map(|(key, _)| flag(key));
    let others = pair.schedule().into_iter().filter(|(key, ..)| !lengths.contains(key));
    others
        .map(|(key, a, b)| {
            format!("note: {key} is {} here and {} in the checkpoint", show(b), show(a))
        })
        .collect()
}

/// The lines that Megatron-LM prints under `--override-opt-param-scheduler`.
fn overriding_lines(pair: &Pair<'_>) -> Vec<String> {
    let line = |(key, theirs, ours): (&str, &Value, &Value)| {
        format!("this run's {key}, {}, overrides the checkpoint's, {}", show(ours), show(theirs))
    };
    pair.schedule().into_iter().map(line).collect()
}

/// The lines that Megatron-LM prints under `--use-checkpoint-opt-param-scheduler`.
fn taken_lines(pair: &Pair<'_>) -> Vec<String> {
    let line = |(key, theirs, ours): (&str, &Value, &Value)| {
        format!(
            "the checkpoint's {key}, {}, is used instead of this run's, {}",
            show(theirs),
            show(ours)
        )
    };
    pair.schedule().into_iter().map(line).collect()
}

/// The effect of the changes: the next step's rate under this run's schedule and under the
/// checkpoint's.
fn next_rate(pair: &Pair<'_>, ours: &RunConfig, progress: &Progress) -> Option<String> {
    let settings = pair.theirs.get("optimizer")?.as_object()?;
    let theirs = LrSchedule::new(&with_schedule(&ours.optimizer, settings).ok()?).ok()?;
    let ours = LrSchedule::new(&ours.optimizer).ok()?;
    let [theirs, ours] = [theirs, ours].map(|schedule| schedule.lr_at(progress.applied()));
    let rates = if ours == theirs {
        String::new()
    } else {
        format!(
            "the next step's learning rate is {ours:.3e}; by the checkpoint's schedule it would be {theirs:.3e}. "
        )
    };
    Some(format!(
        "{rates}--use-checkpoint-opt-param-scheduler keeps the checkpoint's schedule, --override-opt-param-scheduler confirms this run's"
    ))
}

/// Orders of Megatron data sets, and blends, are drawn for the number of samples that the run
/// reads.
fn order_of_samples(pair: &Pair<'_>, ours: &RunConfig) -> Option<String> {
    let samples = |run: &Value| {
        let by_steps = || {
            let [steps, batch] = ["/training/train_iters", "/training/global_batch_size"]
                .map(|p| pair.number(run, p));
            Some(steps?.saturating_mul(batch?))
        };
        pair.number(run, "/training/train_samples").or_else(by_steps)
    };
    let is_drawn =
        matches!(ours.data.dataloader_type, DataloaderType::Single | DataloaderType::Cyclic)
            || ours.data.data_path.first().is_some_and(|first| first.parse::<f64>().is_ok());
    let (theirs, ours) = (samples(pair.theirs)?, samples(pair.ours)?);
    (is_drawn && theirs != ours).then(|| {
        format!(
            "note: the order of samples is drawn for {ours} samples here, but for {theirs} in the \
             checkpoint: if the number of epochs differs, some samples of this epoch may be read \
             twice"
        )
    })
}

fn data_and_model(pair: &Pair<'_>, ours: &RunConfig, progress: &Progress) -> Vec<String> {
    let is_shuffled = ours.data.dataloader_type != DataloaderType::Sequential;
    let length = ours.model.seq_length;
    let position = format!(
        ": the data continue at sample {} of the new length, after the {} tokens already read{}",
        progress.data_position(length),
        progress.consumed_tokens,
        if is_shuffled {
            ". The order of samples is drawn again for this length, so some tokens of this epoch are read twice"
        } else {
            ""
        }
    );
    let seed = if is_shuffled {
        ": samples are read in another order, some of this epoch twice, and dropout masks change"
    } else {
        ": dropout masks change"
    };
    let mut notes = Vec::new();
    let has_other_split = pair.at("/data/split").is_some_and(|(theirs, ours)| {
        match (theirs.as_str(), ours.as_str()) {
            (Some(theirs), Some(ours)) => match (parse_split(theirs), parse_split(ours)) {
                // 969,30,1 means 0.969,0.03,0.001.
                (Ok(theirs), Ok(ours)) => {
                    theirs.iter().zip(ours).any(|(theirs, ours)| (theirs - ours).abs() > 1e-9)
                }
                _ => true,
            },
            _ => true,
        }
    });
    if has_other_split {
        let mixed = ": text used for training may now be used for evaluation, and vice versa";
        notes.extend(pair.note("/data/split", "split", mixed));
    }
    for (pointer, key, consequence) in [
        ("/model/seq_length", "seq_length", position.as_str()),
        ("/training/seed", "seed", seed),
        (
            "/data/dataloader_type",
            "dataloader_type",
            ": samples are read in another order, some of this epoch twice",
        ),
        ("/data/eod_mask_loss", "eod_mask_loss", ""),
        ("/data/reset_position_ids", "reset_position_ids", ""),
        ("/data/reset_attention_mask", "reset_attention_mask", ""),
        ("/model/attention_dropout", "attention_dropout", ""),
        ("/model/hidden_dropout", "hidden_dropout", ""),
    ] {
        notes.extend(pair.note(pointer, key, consequence));
    }
    notes
}

fn update_rule(pair: &Pair<'_>, kind: OptimizerKind) -> Vec<String> {
    let of_kind: &[&str] = match kind {
        OptimizerKind::Adam => {
            &["adam_beta1", "adam_beta2", "adam_eps", "exp_avg_dtype", "exp_avg_sq_dtype"]
        }
        OptimizerKind::Sgd => &["sgd_momentum"],
    };
    let keys = ["clip_grad"].iter().chain(of_kind);
    keys.filter_map(|key| pair.note(&format!("/optimizer/{key}"), key, "")).collect()
}
