//! Configurations that are read, refused and written.

use serde_json::json;

use super::*;

fn read(json: Value) -> std::result::Result<(Family, ModelConfig), String> {
    understand(json.as_object().unwrap()).map(|(family, model, _)| (family, model))
}

fn llama() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
        "intermediate_size": 96, "max_position_embeddings": 128, "num_attention_heads": 8, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 100, "torch_dtype": "bfloat16",
        "bos_token_id": 1, "use_cache": true
    })
}

fn with(mut json: Value, key: &str, value: Value) -> Value {
    json[key] = value;
    json
}

#[test]
fn a_written_config_reads_as_the_same_model() {
    let mut bases = vec![llama()];
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    bases.push(with(llama(), "rope_scaling", llama3));
    bases.push(with(
        llama(),
        "rope_parameters",
        json!({"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
    ));
    bases.push(with(with(llama(), "attention_bias", json!(true)), "mlp_bias", json!(true)));
    bases.push(json!({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 64,
        "intermediate_size": 96, "max_position_embeddings": 128, "num_attention_heads": 8, "num_hidden_layers": 2,
        "vocab_size": 100, "tie_word_embeddings": true, "rope_theta": 1e6}));
    bases.push(mistral());
    let sliding = json!({"use_sliding_window": true, "sliding_window": 16, "max_window_layers": 1});
    for layer_types in [Value::Null, json!(["sliding_attention", "full_attention"])] {
        let mut qwen2 = with(bases[4].clone(), "layer_types", layer_types);
        sliding.as_object().unwrap().iter().for_each(|(key, value)| qwen2[key] = value.clone());
        bases.push(qwen2);
    }
    bases.push(
        json!({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32,
        "vocab_size": 100}),
    );
    bases.push(json!({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100,
        "seq_length": 64}));
    for json in bases {
        let (family, model) = read(json.clone()).unwrap();
        assert_eq!(family_of(&model).unwrap(), family, "{json}");
        let (again, same) = read(to_json(&model, family).into()).unwrap();
        assert_eq!((again, &same), (family, &model), "{json}");
    }
}

#[test]
fn what_would_change_the_result_is_refused_by_name() {
    let refusals = [
        (with(llama(), "model_type", json!("mamba")), "mamba"),
        (
            with(llama(), "architectures", json!(["LlamaForSequenceClassification"])),
            "LlamaForSequenceClassification",
        ),
        (with(llama(), "hidden_act", json!("relu")), "hidden_act"),
        (with(llama(), "attention_bias", json!(true)), "attention_bias"),
        (with(llama(), "rope_scaling", json!({"type": "dynamic", "factor": 2.0})), "dynamic"),
        (with(llama(), "rope_scaling", json!({"rope_type": "linear"})), "factor"),
        (
            with(llama(), "rope_scaling", json!({"rope_type": "linear", "factor": 2, "beta": 3})),
            "beta",
        ),
        (
            with(llama(), "quantization_config", json!({"quant_method": "gptq", "bits": 4})),
            "method gptq): its weights are",
        ),
        (with(llama(), "unheard_of", json!("x")), "could change the result: unheard_of = \"x\""),
        (with(llama(), "partial_rotary_factor", json!(0.5)), "partial_rotary_factor"),
        (
            with(
                with(llama(), "rope_scaling", json!({"type": "linear", "factor": 2})),
                "rope_parameters",
                json!({"factor": 3, "rope_type": "linear"}),
            ),
            "rope_parameters and rope_scaling",
        ),
        (with(llama(), "num_key_value_heads", json!(3)), "num_key_value_heads"),
        (with(llama(), "hidden_size", json!("64")), "hidden_size"),
        (
            with(llama(), "layer_types", json!(["linear_attention", "full_attention"])),
            "linear_attention",
        ),
    ];
    for (json, name) in refusals {
        let why = read(json).unwrap_err();
        assert!(why.contains(name), "{why}");
    }
    let gpt2 = json!({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32,
        "vocab_size": 100});
    for (key, value) in [
        ("activation_function", json!("gelu")),
        ("scale_attn_by_inverse_layer_idx", json!(true)),
        ("scale_attn_weights", json!(false)),
        ("add_cross_attention", json!(true)),
        ("embd_pdrop", json!(0.2)),
    ] {
        let why = read(with(gpt2.clone(), key, value)).unwrap_err();
        assert!(why.contains(key), "{why}");
    }
}

/// The error for a file with this content.
fn refusal(json: Value) -> String {
    let json = json.as_object().unwrap().clone();
    HfConfig::from_json(Path::new("config.json"), json)
        .map(|config| format!("{config:?}"))
        .unwrap_err()
        .to_string()
}

#[test]
fn impossible_models_are_refused_by_the_files_own_names() {
    let scaling = |json| with(llama(), "rope_scaling", json);
    let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64});
    let bloom = json!({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100});
    for (json, name) in [
        (
            with(llama(), "rms_norm_eps", json!(-1)),
            "(rms_norm_eps) must be a finite number above 0",
        ),
        (with(llama(), "rope_theta", json!(0)), "(rope_theta) must be a finite number above 0"),
        (
            scaling(json!({"rope_type": "linear", "factor": 0})),
            "(factor in rope_scaling) must be a finite",
        ),
        (scaling(llama3), "low_freq_factor 4 must be below high_freq_factor 4"),
        (with(mistral(), "sliding_window", json!(0)), "sliding_window = 0 must be at least 1"),
        (with(llama(), "attention_dropout", json!(5)), "attention_dropout = 5 must be in [0, 1)"),
        (
            with(llama(), "max_position_embeddings", json!(0)),
            "(max_position_embeddings) must be at least 1",
        ),
        (with(llama(), "num_hidden_layers", json!(0)), "(num_hidden_layers) must be at least 1"),
        (
            with(llama(), "num_hidden_layers", json!(2_000_000_000)),
            "num_hidden_layers is 2000000000",
        ),
        (with(llama(), "vocab_size", json!(0)), "vocabulary without tokens"),
        (with(bloom.clone(), "n_layer", json!(2_000_000_000)), "num_hidden_layers is 2000000000"),
        (with(bloom, "layer_norm_epsilon", json!(0)), "(layer_norm_epsilon) must be a finite"),
    ] {
        let why = refusal(json);
        assert!(why.contains("config.json") && why.contains(name), "{name}: {why}");
    }
}

fn mistral() -> Value {
    let mistral = with(llama(), "architectures", json!(["MistralForCausalLM"]));
    with(with(mistral, "model_type", json!("mistral")), "sliding_window", json!(32))
}

#[test]
fn layers_have_the_windows_that_the_family_gives_them() {
    let windows = |json| {
        let model = read(json).unwrap().1;
        assert_eq!(model.max_position_embeddings, 128);
        [model.window(0), model.window(1)]
    };
    assert_eq!(windows(llama()), [None; 2]);
    assert_eq!(windows(mistral()), [Some(32); 2]);
    assert_eq!(windows(with(mistral(), "sliding_window", Value::Null)), [None; 2]);
    let mut unsaid = mistral();
    unsaid.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(windows(unsaid), [Some(4096); 2]);
    let mixed = json!(["sliding_attention", "full_attention"]);
    let why = read(with(mistral(), "layer_types", mixed.clone())).unwrap_err();
    assert!(why.contains("layer_types"), "{why}");
    let qwen = with(
        with(llama(), "model_type", json!("qwen2")),
        "architectures",
        json!(["Qwen2ForCausalLM"]),
    );
    let qwen = with(qwen, "sliding_window", json!(16));
    assert_eq!(windows(qwen.clone()), [None; 2]);
    let on = with(qwen, "use_sliding_window", json!(true));
    assert_eq!(windows(on.clone()), [None; 2]); // only layers from 28 on
    assert_eq!(windows(with(on.clone(), "max_window_layers", json!(1))), [None, Some(16)]);
    assert_eq!(windows(with(on.clone(), "max_window_layers", json!(0))), [Some(16); 2]);
    assert_eq!(windows(with(on.clone(), "layer_types", mixed)), [Some(16), None]);
    let why = read(with(on.clone(), "layer_types", json!(["sliding_attention"]))).unwrap_err();
    assert!(why.contains("layer_types"), "{why}");
    let mut unsaid = with(on, "max_window_layers", json!(1));
    assert_eq!(windows(with(unsaid.clone(), "sliding_window", Value::Null)), [None; 2]);
    unsaid.as_object_mut().unwrap().remove("sliding_window");
    assert_eq!(windows(unsaid), [None, Some(4096)]);
}

#[test]
fn null_and_an_empty_object_count_as_absent_for_every_field() {
    let mut full = llama();
    full["rope_theta"] = json!(5e5);
    let qwen2 = json!({"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 128,
        "num_attention_heads": 8, "num_hidden_layers": 2, "vocab_size": 100});
    let gpt2 = json!({"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 32, "vocab_size": 100});
    let bloom = json!({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100});
    let fields = [
        "rope_scaling",
        "rope_parameters",
        "rope_theta",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "attention_bias",
        "mlp_bias",
        "layer_types",
        "n_inner",
        "activation_function",
        "attention_dropout",
        "initializer_range",
        "pretraining_tp",
        "tie_word_embeddings",
        "rms_norm_eps",
        "layer_norm_epsilon",
        "scale_attn_weights",
        "architectures",
        "use_sliding_window",
        "max_window_layers",
        "quantization_config",
        "seq_length",
        "n_ctx",
        "unheard_of",
    ];
    for base in [full.clone(), mistral(), qwen2, gpt2, bloom] {
        for field in fields {
            let mut without = base.clone();
            without.as_object_mut().unwrap().remove(field);
            let expected = read(without).unwrap();
            for nothing in [Value::Null, json!({})] {
                assert_eq!(
                    read(with(base.clone(), field, nothing.clone())).unwrap(),
                    expected,
                    "{field} {nothing}"
                );
            }
        }
    }
    // Next to the other spelling, which applies.
    let both = with(
        with(llama(), "rope_parameters", json!({"rope_theta": 5e5, "type": null})),
        "rope_scaling",
        json!({}),
    );
    assert_eq!(read(both).unwrap().1.rotary_base, 5e5);
    assert_eq!(
        read(with(full, "rope_scaling", json!({"rope_type": {}}))).unwrap().1.rotary_base,
        5e5
    );
}

#[test]
fn fields_that_change_no_result_are_passed_over_and_those_of_other_programs_are_named() {
    let noted = |json: Value| {
        HfConfig::from_json(Path::new("config.json"), json.as_object().unwrap().clone())
            .unwrap()
            .note()
    };
    let mut plain = llama();
    for field in [
        "_name_or_path",
        "transformers_version",
        "dtype",
        "task_specific_params",
        "auto_map",
        "eos_token_id",
    ] {
        plain[field] = json!("any");
    }
    assert_eq!(noted(plain.clone()), None);
    let theirs = [
        ("unsloth_version", json!("2025.1")),
        ("unsloth_fixed", json!(true)),
        ("summary_type", json!("cls_index")),
        ("image_token_id", json!(7)),
        ("num_labels", json!(2)),
        ("resid_pdrop", json!(0.0)),
        ("partial_rotary_factor", json!(1.0)),
    ];
    for (field, value) in theirs {
        let note = noted(with(plain.clone(), field, value)).unwrap();
        assert_eq!(note, format!("config.json has settings that change no result here: {field}"));
    }
    let idle =
        json!({"quant_method": "bitsandbytes", "load_in_4bit": false, "load_in_8bit": false});
    assert_eq!(noted(with(plain, "quantization_config", idle)), None);
}
