use std::collections::BTreeMap;

use super::*;

fn configuration(text: &str) -> Configuration {
    Configuration::of("ds.json".to_string(), &json::parse(text).unwrap())
}

/// The words that `text` adds to nothing, or to what is given by `(key, value)`.
fn words(text: &str, given: &[(&str, &str)]) -> Vec<String> {
    let configuration = configuration(text);
    assert_eq!(configuration.problems, []);
    let added = configuration.beneath(&given_by(given));
    assert_eq!(added.problems, []);
    added.settings.into_iter().flat_map(|(_, setting)| setting.words).collect()
}

fn given_by(given: &[(&str, &str)]) -> BTreeMap<String, Given> {
    let one = |(key, value): &(&str, &str)| {
        (key.to_string(), Given { origin: format!("--{key}"), value: value.to_string() })
    };
    given.iter().map(one).collect()
}

fn problems(text: &str) -> Vec<String> {
    configuration(text).problems.into_iter().map(|(path, why)| format!("{path}: {why}")).collect()
}

/// Without those that hold in any configuration without a scheduler and a clipping.
fn own(text: &str, given: &[(&str, &str)]) -> Vec<String> {
    let usual = ["--lr-decay-style=constant", "--clip-grad=1.0"];
    words(text, given).into_iter().filter(|word| !usual.contains(&word.as_str())).collect()
}

#[test]
fn keys_become_flags() {
    let text = r#"{"train_batch_size": 16, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5, "warmup_num_steps": 5e2}},
        "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "overlap_comm": true,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/disk", "pin_memory": true}}, "steps_per_print": 10}"#;
    let mut words = words(text, &[]);
    words.sort();
    let expected = [
        "--adam-beta1=0.8",
        "--adam-beta2=0.99",
        "--adam-eps=1e-6",
        "--bf16=true",
        "--clip-grad=0.5",
        "--global-batch-size=16",
        "--gradient-accumulation-steps=2",
        "--log-interval=10",
        "--lr-schedule=WarmupLR",
        "--lr=0.00001",
        "--nvme-path=/disk",
        "--offload-optimizer=nvme",
        "--optimizer=adam",
        "--overlap-grad-reduce=true",
        "--warmup-max-lr=0.00001",
        "--warmup-min-lr=0",
        "--warmup-num-steps=500",
        "--weight-decay=3e-7",
        "--zero-stage=3",
    ];
    assert_eq!(words, expected);
}

#[test]
fn what_a_configuration_leaves_open_is_deepspeeds_default() {
    assert_eq!(words("{}", &[]), ["--lr-decay-style=constant", "--clip-grad=1.0"]);
    let adam = r#"{"optimizer": {"type": "Adam"}}"#;
    assert_eq!(own(adam, &[]), ["--optimizer=adam", "--lr=0.001", "--weight-decay=0"]);
    let given =
        [("lr", "3e-4"), ("weight_decay", "0.1"), ("clip_grad", "0"), ("lr_decay_style", "cosine")];
    assert_eq!(words(adam, &given), ["--optimizer=adam"]);
    let torch = r#"{"optimizer": {"type": "AdamW", "params": {"lr": 1, "torch_adam": true}}}"#;
    assert!(own(torch, &[]).contains(&"--weight-decay=0.01".to_string()));
    let once = r#"{"train_batch_size": 8}"#;
    assert_eq!(own(once, &[]), ["--global-batch-size=8", "--gradient-accumulation-steps=1"]);
    assert_eq!(own(once, &[("micro_batch_size", "2")]), ["--global-batch-size=8"]);
}

#[test]
fn auto_is_what_flags_say_and_else_the_trainers_default() {
    let text = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}"#;
    let given =
        [("lr", "1e-4"), ("micro_batch_size", "2"), ("weight_decay", "0.1"), ("fp16", "true")];
    let expected = [
        "--initial-loss-scale=65536",
        "--optimizer=adam",
        "--zero-stage=2",
        "--gradient-accumulation-steps=1",
    ];
    let mut got = own(text, &given);
    got.sort();
    let mut sorted = expected.map(str::to_string).to_vec();
    sorted.sort();
    assert_eq!(got, sorted);
    let alone = own(text, &[]);
    for word in
        ["--lr=5e-5", "--micro-batch-size=8", "--weight-decay=0", "--gradient-accumulation-steps=1"]
    {
        assert!(alone.contains(&word.to_string()), "{word} is not in {alone:?}");
    }
}

#[test]
fn keys_without_a_meaning_are_listed() {
    let text = r#"{"zero_optimization": {"stage": 3, "contiguous_gradients": true, "sub_group_size": 1e9,
        "reduce_bucket_size": 1e6, "stage3_max_live_parameters": 1e9}, "prescale_gradients": false}"#;
    let added = configuration(text).beneath(&BTreeMap::new());
    let expected = "ds.json: without effect here: prescale_gradients, zero_optimization.contiguous_gradients, \
                    zero_optimization.reduce_bucket_size, zero_optimization.stage3_max_live_parameters, \
                    zero_optimization.sub_group_size";
    assert_eq!(added.notes, [expected]);
}

#[test]
fn hostile_keys_are_named_all_at_once() {
    let text = r#"{"train_batch_sise": 8, "zero_optimization": {"stage": "three", "zero_quantized_weights": true},
        "optimizer": {"type": "Lamb"}, "fp16": {"enabled": 1}, "amp": {"enabled": true}, "elasticity": {"enabled": false},
        "scheduler": {"type": "StepLR"}, "gradient_clipping": [1], "bf16": true, "train_micro_batch_size_per_gpu": 2.5}"#;
    let mut problems = problems(text);
    problems.sort();
    let expected = [
        "amp: use \"bf16\" or \"fp16\"",
        "bf16: expects an object, { … }, not true",
        "fp16.enabled: expects true or false, not 1",
        "gradient_clipping: expects a number, not [1]",
        "optimizer.type: cannot be Lamb: use AdamW, Adam or SGD",
        "scheduler.type: cannot be StepLR: use one of WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest",
        "train_batch_sise: unknown key; did you mean \"train_batch_size\"?",
        "train_micro_batch_size_per_gpu: expects a whole number of 0 or more, not 2.5",
        "zero_optimization.stage: expects a whole number, not three",
        "zero_optimization.zero_quantized_weights: cannot be true: weights travel in the model's dtype here",
    ];
    assert_eq!(problems, expected);
}

#[test]
fn flags_must_say_the_same() {
    let text =
        r#"{"gradient_clipping": 0.5, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}"#;
    let agreeing = configuration(text).beneath(&given_by(&[("lr", "1e-4"), ("clip_grad", "0.50")]));
    assert_eq!(agreeing.problems, []);
    let added = configuration(text).beneath(&given_by(&[("lr", "2e-4")]));
    let expected = "lr = 0.0001 contradicts --lr, which says 2e-4; change one of them, or write \"auto\" in the file";
    assert_eq!(
        added.problems,
        [("ds.json: optimizer.params.lr".to_string(), expected.to_string())]
    );
}

#[test]
fn a_fixed_loss_scale_leaves_the_dynamic_ones_settings_without_effect() {
    let text = r#"{"fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 16, "hysteresis": 2}}"#;
    assert_eq!(own(text, &[]), ["--fp16=true", "--loss-scale=128"]);
    let off = r#"{"fp16": {"enabled": false, "loss_scale": 0, "initial_scale_power": 16}}"#;
    assert_eq!(own(off, &[]), ["--fp16=false"]);
}

#[test]
fn saved_activations_are_cut_where_there_is_tensor_parallelism() {
    let text = r#"{"activation_checkpointing": {"partition_activations": true}}"#;
    assert_eq!(own(text, &[]), ["--recompute-granularity=full"]);
    let cut = ["--distribute-saved-activations=true", "--recompute-granularity=full"];
    assert_eq!(own(text, &[("tensor_model_parallel_size", "2")]), cut);
}

/// Every flag of the table is one that a run has.
#[test]
fn every_flag_of_the_table_exists() {
    let known: Vec<String> = crate::cli::flags::sections()
        .into_iter()
        .flat_map(|(_, args)| args)
        .filter_map(|arg| arg.get_long().map(str::to_string))
        .collect();
    let missing: Vec<&str> =
        keys::flags().into_iter().filter(|flag| !known.iter().any(|other| other == flag)).collect();
    assert_eq!(missing, [""; 0]);
}
