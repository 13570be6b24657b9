//! `zero_optimization`.

use serde_json::Value;

use super::super::keys::{Kind, OFFLOAD, ZERO};
use super::super::{Configuration, text_of};

/// DeepSpeed's own folder for files.
const LOCAL_NVME: &str = "/local_nvme";

/// `zero_optimization`; `true` alone is stage 1.
pub fn section(c: &mut Configuration, path: &str, value: &Value) {
    match value {
        Value::Bool(false) => {}
        Value::Bool(true) => c.say(path, "zero-stage", "1"),
        other => {
            let Some(object) = c.object(path, other) else { return };
            // Other keys depend on it.
            let (stage, others) =
                object.iter().map(|(k, v)| (k.clone(), v.clone())).partition(|(k, _)| k == "stage");
            c.section(path, &stage, ZERO);
            c.section(path, &others, ZERO);
        }
    }
}

/// `reduce_bucket_size`: buckets of ZeRO-2 and 3 are units.
pub fn bucket_size(c: &mut Configuration, path: &str, value: &Value) {
    let stage = c.said.iter().find(|said| said.setting.key == "zero_stage");
    let by_unit = stage
        .is_some_and(|said| ["2", "3"].contains(&super::super::merge::value_of(&said.setting)));
    match value {
        auto if *auto == "auto" => c.without_effect.push(path.to_string()),
        number if by_unit => match Kind::Whole.text(number) {
            Ok(_) => c.without_effect.push(path.to_string()),
            Err(expected) => {
                c.problem(path, format!("expects {expected}, not {}", text_of(number)));
            }
        },
        number => c.flag(path, "bucket-size", Kind::Whole, number),
    }
}

/// `offload_param`.
pub fn offload_param(c: &mut Configuration, path: &str, value: &Value) {
    offload(c, path, "offload-param", value);
}

/// `offload_optimizer`.
pub fn offload_optimizer(c: &mut Configuration, path: &str, value: &Value) {
    offload(c, path, "offload-optimizer", value);
}

fn offload(c: &mut Configuration, path: &str, flag: &str, value: &Value) {
    if *value == Value::Bool(false) {
        return;
    }
    let Some(object) = c.object(path, value) else { return };
    let quiet = c.without_effect.len();
    c.section(path, object, OFFLOAD);
    let own = ["device", "nvme_path"].map(|key| format!("{path}.{key}"));
    let tail = c.without_effect.split_off(quiet);
    c.without_effect.extend(tail.into_iter().filter(|path| !own.contains(path)));
    match object.get("device").map(|device| device.as_str()) {
        None | Some(Some("none")) => {}
        Some(Some(device @ ("cpu" | "nvme"))) => {
            c.say(&own[0], flag, device);
            if device == "nvme" {
                nvme_path(c, &own[1], object.get("nvme_path"));
            }
        }
        Some(other) => {
            let message = format!("cannot be {}: use none, cpu or nvme", other.unwrap_or("this"));
            c.problem(&own[0], message);
        }
    }
}

/// The folder of the files: DeepSpeed's own if the machine has it, else the system's temporary one.
fn nvme_path(c: &mut Configuration, path: &str, value: Option<&Value>) {
    match value {
        None | Some(Value::Null) => {
            let local = std::path::Path::new(LOCAL_NVME);
            let folder = if local.is_dir() { local.to_path_buf() } else { std::env::temp_dir() };
            let setting = c.setting("nvme-path", &folder.display().to_string());
            if !c.otherwise.iter().any(|other| other.said.setting.key == "nvme_path") {
                c.otherwise(
                    &format!("{path}: not given"),
                    setting,
                    &["offload_optimizer_nvme_path"],
                );
            }
        }
        Some(folder) => c.flag(path, "nvme-path", Kind::Text, folder),
    }
}

/// `cpu_offload`, the old name of `offload_optimizer`.
pub fn cpu_offload(c: &mut Configuration, path: &str, value: &Value) {
    old_switch(c, path, "offload-optimizer", value);
}

/// `cpu_offload_param`, the old name of `offload_param`.
pub fn cpu_offload_param(c: &mut Configuration, path: &str, value: &Value) {
    old_switch(c, path, "offload-param", value);
}

fn old_switch(c: &mut Configuration, path: &str, flag: &str, value: &Value) {
    match value {
        Value::Bool(true) => c.say(path, flag, "cpu"),
        Value::Bool(false) => {}
        other => c.problem(path, format!("expects true or false, not {}", text_of(other))),
    }
}
