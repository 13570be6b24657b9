//! Megatron-LM's own command lines, from its functional tests: they start, or are refused because
//! of an unsupported feature.
//!
//! The lines in fixtures/megatron/command_lines.json are those of Megatron-LM d98e8a64. Later flags
//! override their paths and sizes.

use std::process::Output;

use serde_json::{Map, Value};

use crate::site::Site;
use crate::support::{megatron, stderr, stdout};

const LINES: &str = include_str!("../fixtures/megatron/command_lines.json");

const SIZES: &str = "--hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 \
    --micro-batch-size 1 --global-batch-size 4 --split 90,5,5 --eval-iters 1 --tokenizer byte --cache-dir cache \
    --tensorboard-dir curves --save saved --load saved";

/// Lines that start, each with further sizes.
const START: [(&str, &str); 11] = [
    (
        "gpt/gpt3_mcore_reruns_disable",
        "--num-layers 2 --num-query-groups 2 --ffn-hidden-size 64 --kv-channels 8",
    ),
    ("gpt/gpt3_mcore_te_tp1_pp1_resume_torch_dist_dist_optimizer", "--num-layers 2"),
    ("gpt/gpt3_mcore_te_tp1_pp1_uniform_full_recompute", "--num-layers 2"),
    ("gpt/gpt3_mcore_te_tp1_pp4_vp1_tunable_overlap", "--num-layers 8"),
    ("gpt/gpt3_mcore_te_tp1_pp4_vp1_uneven_pipeline", ""),
    ("gpt/gpt3_mcore_te_tp1_pp4_vp2_account_for_embedding_loss_in_pipeline_split", ""),
    (
        "gpt/gpt3_mcore_te_tp2_pp1_multi_dist_optimizer_instances",
        "--num-layers 2 --data-parallel-size 4",
    ),
    (
        "gpt/gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor_1node",
        "--num-layers 2 --data-parallel-size 4",
    ),
    ("gpt/gpt3_mcore_te_tp2_pp2_cp2_etp4_dp_last", "--num-layers 2"),
    ("gpt/gpt3_mcore_tp1_pp2_fp16", "--num-layers 2"),
    (
        "gpt/gpt3_mcore_te_tp4_pp1_resume_torch_dist_dist_optimizer_overlap_grad_reduce_param_gather_1node",
        "--num-layers 2",
    ),
];

/// Lines that are refused, each with the unsupported feature.
const REFUSED: [(&str, &[&str]); 9] = [
    (
        "gpt/gpt3_15b_8t_release_sm_gb200",
        &[
            "--apply-layernorm-1p",
            "--rotary-percent 0.5",
            "--squared-relu",
            "--decoupled-lr",
            "--step-batch-size-schedule",
        ],
    ),
    ("gpt/gpt3_mcore_te_tp1_pp4_vp1_resume_torch_decoupled_lr_1node", &["--decoupled-lr 0.0002"]),
    ("gpt/gpt3_mcore_te_tp4_pp1_qk_layernorm_test_mode", &["--qk-layernorm"]),
    (
        "gpt/gpt3_mcore_te_tp2_pp2_mla_1node",
        &["--multi-latent-attention, --q-lora-rank", "latent attention is not supported"],
    ),
    (
        "gpt/gpt3_mcore_te_tp2_pp1_modelopt_distill_resume",
        &["--export-kd-cfg", "--rotary-percent 0.5"],
    ),
    (
        "gpt/gpt3_weekly_mcore_tp2_pp2_current_scaling_native_fp8_tp_pp_sp_tp_overlap",
        &["--fp8-format", "FP8 and FP4 are not supported"],
    ),
    (
        "moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_selective_recompute_experimental",
        &["--num-experts 32", "mixture of experts is not supported", "--recompute-modules"],
    ),
    (
        "moe/gpt3_moe_mcore_te_ep8_resume_torch_dist_dist_muon",
        &["--optimizer muon", "--num-experts 8"],
    ),
    ("bert/bert_release", &["--bert-no-binary-head", "encoders (BERT, T5) are not supported"]),
];

fn words(name: &str) -> Vec<String> {
    let lines: Map<String, Value> = serde_json::from_str(LINES).unwrap();
    let mut words = Vec::new();
    for (flag, value) in lines[name].as_object().unwrap() {
        words.push(flag.clone());
        match value {
            Value::Bool(true) => {}
            Value::String(text) if text.starts_with('[') => {
                words.extend(text.trim_matches(['[', ']']).split(' ').map(str::to_string));
            }
            Value::String(text) => words.push(text.clone()),
            other => words.push(other.to_string()),
        }
    }
    words
}

fn pretrain(site: &Site, name: &str, sizes: &str) -> Output {
    let mut command = site.mark(megatron());
    command
        .arg("pretrain")
        .args(words(name))
        .args(SIZES.split_whitespace())
        .args(sizes.split_whitespace());
    command.output().unwrap()
}

/// Errors in flags are reported before data are opened.
#[test]
fn lines_that_ask_for_nothing_that_is_not_there_get_as_far_as_their_data() {
    for (name, sizes) in START {
        let site = Site::new();
        let output = pretrain(&site, name, &format!("{sizes} --data-path no-such-data"));
        let text = stderr(&output);
        assert!(!output.status.success() && text.contains("no-such-data"), "{name}: {text}");
    }
}

#[test]
fn other_lines_are_refused_for_all_that_is_not_there_at_once() {
    for (name, parts) in REFUSED {
        let site = Site::new();
        let output = pretrain(&site, name, "--data-path text.txt");
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{name}: {text}");
        assert!(!text.contains("no such flag"), "{name}: {text}");
        for part in parts {
            assert!(text.contains(part), "{name}: no {part:?} in {text}");
        }
    }
}

#[test]
fn lines_train_and_say_once_what_they_pass_over() {
    let lines = [START[0], START[8]];
    for (name, sizes) in lines {
        let site = Site::new();
        let output =
            pretrain(&site, name, &format!("{sizes} --train-iters 2 --data-path text.txt"));
        assert!(output.status.success(), "{name}: {}", stderr(&output));
        let text = stdout(&output);
        let saved =
            std::fs::read_to_string(site.path("saved/latest_checkpointed_iteration.txt")).unwrap();
        assert_eq!(saved.trim(), "2", "{name}: {text}");
        let notes: Vec<&str> = text
            .lines()
            .filter(|line| line.contains("of Megatron-LM have no effect here: "))
            .collect();
        assert!(
            matches!(notes.as_slice(), [note] if note.contains("--use-mcore-models")),
            "{name}: {text}"
        );
        let backend =
            "distributed_backend = nccl (--distributed-backend): this run computes on CPUs";
        assert_eq!(text.matches(backend).count(), 1, "{name}: {text}");
    }
}
