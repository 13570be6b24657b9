//! Precision: `fp16`, `communication_data_type`, `data_types.param_dtype`.

use serde_json::Value;

use super::super::keys::{Kind, Rule};
use super::super::{Configuration, text_of};

const ALWAYS: &[(&str, Rule)] = &[
    ("enabled", Rule::Auto("fp16", Kind::Bool, None)),
    ("loss_scale", Rule::Auto("loss-scale", Kind::Number, None)),
    ("auto_cast", Rule::NoEffect),
    (
        "fp16_master_weights_and_grads",
        Rule::Only(&["false"], "master weights and sums of gradients are in fp32 here"),
    ),
    ("initial_scale_power", Rule::By(initial_scale)),
    ("loss_scale_window", Rule::Auto("loss-scale-window", Kind::Whole, None)),
    ("hysteresis", Rule::Auto("hysteresis", Kind::Whole, None)),
    ("consecutive_hysteresis", Rule::Flag("consecutive-hysteresis", Kind::Bool)),
    ("min_loss_scale", Rule::Auto("min-loss-scale", Kind::Number, None)),
];

/// Settings of a dynamic loss scale, which a fixed one leaves without effect.
const DYNAMIC: [&str; 5] = [
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
];

/// `fp16`.
pub fn section(c: &mut Configuration, path: &str, value: &Value) {
    let Some(object) = c.object(path, value) else { return };
    if !c.is_enabled(path, object) {
        return c.off(path, object, ALWAYS);
    }
    let scale = object.get("loss_scale").and_then(Value::as_f64);
    let is_fixed = scale.is_some_and(|scale| scale != 0.0);
    let (idle, judged): (Vec<_>, Vec<_>) = object
        .iter()
        .map(|(key, value)| (key.clone(), value.clone()))
        .partition(|(key, _)| is_fixed && DYNAMIC.contains(&key.as_str()));
    c.without_effect.extend(idle.iter().map(|(key, _)| format!("{path}.{key}")));
    c.section(
        path,
        &judged.into_iter().filter(|(key, _)| key != "loss_scale" || is_fixed).collect(),
        ALWAYS,
    );
}

fn initial_scale(c: &mut Configuration, path: &str, value: &Value) {
    match value.as_u64() {
        Some(power @ 0..=1023) => {
            c.say(path, "initial-loss-scale", &2f64.powi(power as i32).to_string());
        }
        _ if *value == "auto" => {}
        _ => {
            let message = format!("expects a power of 2 from 0 to 1023, not {}", text_of(value));
            c.problem(path, message);
        }
    }
}

/// `communication_data_type`: that of gradients on their way.
pub fn communication(c: &mut Configuration, path: &str, value: &Value) {
    match value.as_str().map(str::to_lowercase).as_deref() {
        Some("fp32") => c.without_effect.push(path.to_string()),
        Some("bf16" | "bfp16") => c.say(path, "grad-reduce-in-bf16", "true"),
        Some("fp16") => c.say(path, "grad-reduce-in-fp16", "true"),
        _ => c.problem(path, format!("cannot be {}: use fp32, bf16 or fp16", text_of(value))),
    }
}

/// `data_types.param_dtype`: the dtype of weights, as `bf16` and `fp16` say it, too.
pub fn param_dtype(c: &mut Configuration, path: &str, value: &Value) {
    match value.as_str() {
        Some("bf16" | "bfloat16") => c.say(path, "bf16", "true"),
        Some("fp16" | "float16" | "half") => c.say(path, "fp16", "true"),
        Some("fp32" | "float32" | "float") => {
            c.say(path, "bf16", "false");
            c.say(path, "fp16", "false");
        }
        _ => c.problem(path, format!("cannot be {}: use fp32, bf16 or fp16", text_of(value))),
    }
}
