//! Sections of the configuration whose keys depend on each other.

pub(super) mod fp16;
pub(super) mod zero;

use std::path::Path;

use serde_json::{Map, Value};

use super::keys::{Kind, OPTIMIZERS, Rule, SCHEDULES};
use super::{Configuration, text_of};

type Object = Map<String, Value>;

/// `type` and `params` of a section; no others are known.
fn kind_and_params<'a>(
    c: &mut Configuration,
    path: &str,
    value: &'a Value,
) -> Option<(&'a str, Option<&'a Object>)> {
    const KEYS: &[(&str, Rule)] =
        &[("type", Rule::NoEffect), ("params", Rule::NoEffect), ("legacy_fusion", Rule::NoEffect)];
    let object = c.object(path, value)?;
    let quiet = c.without_effect.len();
    c.section(path, object, KEYS);
    c.without_effect.truncate(quiet);
    let params = match object.get("params") {
        None | Some(Value::Null) => None,
        Some(params) => Some(c.object(&format!("{path}.params"), params)?),
    };
    match object.get("type") {
        Some(Value::String(kind)) => Some((kind, params)),
        Some(other) => {
            let message = format!("expects a string, not {}", text_of(other));
            c.problem(&format!("{path}.type"), message);
            None
        }
        None => {
            c.problem(path, "has no \"type\"");
            None
        }
    }
}

/// `optimizer`.
pub fn optimizer(c: &mut Configuration, path: &str, value: &Value) {
    let Some((kind, params)) = kind_and_params(c, path, value) else { return };
    let lower = kind.to_lowercase();
    let Some((_, (ours, keys, defaults))) =
        OPTIMIZERS.iter().find(|(names, _)| names.contains(&lower.as_str()))
    else {
        let message = format!("cannot be {kind}: use AdamW, Adam or SGD");
        return c.problem(&format!("{path}.type"), message);
    };
    c.say(&format!("{path}.type"), "optimizer", ours);
    if let Some(params) = params {
        c.section(&format!("{path}.params"), params, keys);
    }
    // PyTorch's AdamW decays by 0.01 where DeepSpeed's does not decay.
    let is_torch = |params: &Object| params.get("torch_adam") == Some(&Value::Bool(true));
    for (flag, default) in *defaults {
        let key = match *flag {
            "weight-decay" => "weight_decay",
            "sgd-momentum" => "momentum",
            other => other,
        };
        let default = match *flag {
            "weight-decay" if lower == "adamw" && params.is_some_and(is_torch) => "0.01",
            _ => default,
        };
        if !params.is_some_and(|params| params.contains_key(key)) {
            let setting = c.setting(flag, default);
            c.otherwise(&format!("{path}.params: {kind}'s default"), setting, &[]);
        }
    }
}

/// `optimizer.params.betas`.
pub fn betas(c: &mut Configuration, path: &str, value: &Value) {
    match value.as_array().map(Vec::as_slice) {
        Some([first, second]) if first.is_number() && second.is_number() => {
            c.flag(path, "adam-beta1", Kind::Number, first);
            c.flag(path, "adam-beta2", Kind::Number, second);
        }
        None if *value == "auto" => {}
        _ => c.problem(path, format!("expects two numbers, [β1, β2], not {}", text_of(value))),
    }
}

/// `optimizer.params.adam_w_mode`.
pub fn adam_w_mode(c: &mut Configuration, path: &str, value: &Value) {
    match value {
        Value::Bool(true) => c.without_effect.push(path.to_string()),
        // Without weight decay both are the same; so the decay is held at 0.
        Value::Bool(false) => {
            c.say(path, "weight-decay", "0");
            c.notes.push(format!(
                "{}: weight decay is decoupled here (AdamW), so without it weight_decay has to be 0",
                c.origin(path)
            ));
        }
        other => c.problem(path, format!("expects true or false, not {}", text_of(other))),
    }
}

/// `scheduler`.
pub fn scheduler(c: &mut Configuration, path: &str, value: &Value) {
    let Some((kind, params)) = kind_and_params(c, path, value) else { return };
    let Some((name, keys)) = SCHEDULES.iter().find(|(name, _)| *name == kind) else {
        let known: Vec<&str> = SCHEDULES.iter().map(|(name, _)| *name).collect();
        let message = format!("cannot be {kind}: use one of {}", known.join(", "));
        return c.problem(&format!("{path}.type"), message);
    };
    c.say(&format!("{path}.type"), "lr-schedule", name);
    if let Some(params) = params {
        c.section(&format!("{path}.params"), params, keys);
    }
    let has_peak = params.is_some_and(|params| params.contains_key("warmup_max_lr"));
    if keys.iter().any(|(key, _)| *key == "warmup_max_lr") && !has_peak {
        let peak = c.setting("warmup-max-lr", "0.001");
        c.otherwise(&format!("{path}.params: {name}'s default"), peak, &[]);
    }
}

/// The three numbers of the batch: DeepSpeed accumulates once where two of them are missing.
pub fn batch(c: &mut Configuration, object: &Object) {
    let says = |key: &str| object.get(key).is_some_and(|value| !value.is_null());
    if says("train_batch_size")
        && !says("gradient_accumulation_steps")
        && !says("train_micro_batch_size_per_gpu")
    {
        let once = c.setting("gradient-accumulation-steps", "1");
        c.otherwise("no gradient_accumulation_steps", once, &["micro_batch_size"]);
    }
}

const ACTIVATIONS: &[(&str, Rule)] = &[
    ("partition_activations", Rule::Flag("distribute-saved-activations", Kind::Bool)),
    ("cpu_checkpointing", Rule::By(cpu_checkpointing)),
    ("contiguous_memory_optimization", Rule::NoEffect),
    ("number_checkpoints", Rule::NoEffect),
    ("synchronize_checkpoint_boundary", Rule::NoEffect),
    ("profile", Rule::NoEffect),
];

/// `activation_checkpointing`. In DeepSpeed the model's code checkpoints; here a switch that needs it
/// turns it on.
pub fn activation_checkpointing(c: &mut Configuration, path: &str, value: &Value) {
    let Some(object) = c.object(path, value) else { return };
    c.section(path, object, ACTIVATIONS);
    for key in ["partition_activations", "cpu_checkpointing"] {
        if object.get(key) == Some(&Value::Bool(true)) {
            return c.say(&format!("{path}.{key}"), "recompute-granularity", "full");
        }
    }
}

fn cpu_checkpointing(c: &mut Configuration, path: &str, value: &Value) {
    match value {
        Value::Bool(true) => c.say(path, "offload-activations", "cpu"),
        Value::Bool(false) => {}
        other => c.problem(path, format!("expects true or false, not {}", text_of(other))),
    }
}

/// `tensor_parallel`.
pub fn tensor_parallel(c: &mut Configuration, path: &str, value: &Value) {
    const SIZE: Rule = Rule::Flag("tensor-model-parallel-size", Kind::Whole);
    const KEYS: &[(&str, Rule)] = &[
        ("enabled", Rule::NoEffect),
        ("autotp_size", SIZE),
        ("tp_size", SIZE),
        ("tp", Rule::Section(&[("tp_size", SIZE), ("tp_grain_size", Rule::NoEffect)])),
        ("tensor_parallel", Rule::Section(&[("tp_size", SIZE), ("tp_grain_size", Rule::NoEffect)])),
        ("dtype", Rule::NoEffect),
        ("tp_overlap_comm", Rule::NoEffect),
        ("vocab_parallel_lm_head", Rule::NoEffect),
        ("vocab_parallel_ce_backend", Rule::NoEffect),
        ("injection_policy_tuple", Rule::NoEffect),
        ("partition_config", Rule::NoEffect),
        ("preset_model", Rule::NoEffect),
        ("keep_module_on_host", Rule::NoEffect),
        ("replace_with_kernel_inject", Rule::NoEffect),
    ];
    let Some(object) = c.object(path, value) else { return };
    if object.get("enabled") != Some(&Value::Bool(false)) {
        c.section(path, &without(object, "enabled"), KEYS);
    }
}

/// `pipeline_parallel`. A step's microbatches are `gradient_accumulation_steps`, in DeepSpeed's
/// pipeline, too.
pub fn pipeline_parallel(c: &mut Configuration, path: &str, value: &Value) {
    const KEYS: &[(&str, Rule)] = &[
        ("pp_size", Rule::Flag("pipeline-model-parallel-size", Kind::Whole)),
        ("micro_batches", Rule::By(micro_batches)),
    ];
    let Some(object) = c.object(path, value) else { return };
    if object.get("enabled") != Some(&Value::Bool(false)) {
        c.section(path, &without(object, "enabled"), KEYS);
    }
}

fn micro_batches(c: &mut Configuration, path: &str, value: &Value) {
    match Kind::Whole.text(value) {
        Ok(number) => {
            let line = format!(
                "{} = {number} has no effect: a step has gradient_accumulation_steps microbatches, \
                 as in DeepSpeed's pipeline",
                c.origin(path)
            );
            c.notes.push(line);
        }
        Err(expected) => c.problem(path, format!("expects {expected}, not {}", text_of(value))),
    }
}

/// `pipeline.stages`.
pub fn stages(c: &mut Configuration, path: &str, value: &Value) {
    match value {
        auto if *auto == "auto" => c.without_effect.push(path.to_string()),
        number => c.flag(path, "pipeline-model-parallel-size", Kind::Whole, number),
    }
}

/// `pipeline.partition`.
pub fn partition(c: &mut Configuration, path: &str, value: &Value) {
    match value.as_str() {
        Some("best" | "auto") => c.without_effect.push(path.to_string()),
        Some(method)
            if matches!(method, "uniform" | "parameters") || method.starts_with("type:") =>
        {
            c.say(path, "pipeline-partition", method);
        }
        _ => {
            let message =
                format!("cannot be {}: use uniform, parameters or type:REGEX", text_of(value));
            c.problem(path, message);
        }
    }
}

/// `pipeline.activation_checkpoint_interval`.
pub fn checkpoint_interval(c: &mut Configuration, path: &str, value: &Value) {
    match Kind::Whole.text(value) {
        Ok(none) if none == "0" => {}
        Ok(layers) => {
            c.say(path, "recompute-granularity", "full");
            c.say(path, "recompute-num-layers", &layers);
        }
        Err(expected) => c.problem(path, format!("expects {expected}, not {}", text_of(value))),
    }
}

/// `steps_per_print`.
pub fn steps_per_print(c: &mut Configuration, path: &str, value: &Value) {
    match value {
        Value::String(never) if never == "inf" || never == "auto" => {
            c.without_effect.push(path.to_string());
        }
        number => c.flag(path, "log-interval", Kind::Whole, number),
    }
}

/// `flops_profiler`: a step is profiled, and the timers are on, as in DeepSpeed.
pub fn flops_profiler(c: &mut Configuration, path: &str, value: &Value) {
    const KEYS: &[(&str, Rule)] = &[
        ("profile_step", Rule::NoEffect),
        ("module_depth", Rule::NoEffect),
        ("top_modules", Rule::NoEffect),
        ("detailed", Rule::NoEffect),
        ("output_file", Rule::NoEffect),
        ("recompute_fwd_factor", Rule::NoEffect),
    ];
    let Some(object) = c.object(path, value) else { return };
    if !c.is_enabled(path, object) {
        return;
    }
    let mut others = without(object, "enabled");
    let step = others.remove("profile_step").unwrap_or_else(|| 1.into());
    c.section(path, &others, KEYS);
    match Kind::Whole.text(&step).map(|text| text.parse::<u64>()) {
        Ok(Ok(step @ 1..)) => {
            c.say(&format!("{path}.enabled"), "profile", "true");
            c.say(&format!("{path}.profile_step"), "profile-step-start", &step.to_string());
            c.say(&format!("{path}.profile_step"), "profile-step-end", &(step + 1).to_string());
            let timers = c.setting("wall-clock-breakdown", "true");
            c.otherwise(&format!("{path}.enabled"), timers, &[]);
        }
        _ => {
            let message = format!("expects a step from 1 on, not {}", text_of(&step));
            c.problem(&format!("{path}.profile_step"), message);
        }
    }
}

/// Folder and name of a monitor that is on.
fn monitor(c: &mut Configuration, path: &str, value: &Value) -> Option<std::path::PathBuf> {
    const KEYS: &[(&str, Rule)] = &[("output_path", Rule::NoEffect), ("job_name", Rule::NoEffect)];
    let object = c.object(path, value)?;
    if !c.is_enabled(path, object) {
        return None;
    }
    let quiet = c.without_effect.len();
    c.section(path, &without(object, "enabled"), KEYS);
    c.without_effect.truncate(quiet);
    let mut part = |key: &str, default: &str| match object.get(key) {
        None | Some(Value::Null) => Some(default.to_string()),
        Some(Value::String(text)) => Some(text.clone()),
        Some(other) => {
            let message = format!("expects a string, not {}", text_of(other));
            c.problem(&format!("{path}.{key}"), message);
            None
        }
    };
    let (folder, name) = (part("output_path", "")?, part("job_name", "DeepSpeedJobName")?);
    Some(Path::new(&folder).join(name))
}

/// `tensorboard`.
pub fn tensorboard(c: &mut Configuration, path: &str, value: &Value) {
    if let Some(folder) = monitor(c, path, value) {
        c.say(path, "tensorboard-dir", &folder.display().to_string());
    }
}

/// `csv_monitor`: one file of JSON lines has what DeepSpeed writes into a file for each value.
pub fn csv_monitor(c: &mut Configuration, path: &str, value: &Value) {
    if let Some(folder) = monitor(c, path, value) {
        let file = folder.join("metrics.jsonl").display().to_string();
        c.say(path, "metrics", &file);
        c.notes
            .push(format!("{}: {file} has a JSON object for each step, not CSV", c.origin(path)));
    }
}

/// `object` without one of its keys.
fn without(object: &Object, key: &str) -> Object {
    object.iter().filter(|(other, _)| *other != key).map(|(k, v)| (k.clone(), v.clone())).collect()
}
