//! Unusable input: every rank ends soon with one message; nothing is overwritten or left behind.

use std::fs;

use crate::site::{SOON, Site, ended, refused};
use crate::support::{megatron, stderr};

/// Asserts that the run is refused with all of `parts`, under a supervisor and, rank by rank, under
/// a launcher.
fn both_refuse(site: &Site, flags: &[&str], parts: &[&str]) {
    let before = site.files();
    let supervised = ended(vec![site.pretrain(flags).spawn().unwrap()], SOON);
    refused(&supervised[0], parts);
    for output in ended(site.ranks(flags), SOON) {
        refused(&output, parts);
    }
    site.assert_unchanged(&before);
    site.assert_nothing_left();
}

#[test]
fn sizes_that_do_not_divide() {
    let site = Site::new();
    let cases: [(&[&str], &[&str]); 8] = [
        (
            &["--num-attention-heads=5"],
            &["num_attention_heads = 5 (--num-attention-heads)", "32 mod 5 = 2"],
        ),
        (
            &["--num-query-groups=1"],
            &["num_query_groups = 1", "tensor_model_parallel_size = 2 (run.toml:"],
        ),
        (&["--global-batch-size=7"], &["global_batch_size = 7", "7 mod 2 = 1"]),
        (&["--num-layers=1"], &["num_layers = 1 (--num-layers)"]),
        (
            &["--num-layers-per-virtual-pipeline-stage=3"],
            &["num_layers_per_virtual_pipeline_stage = 3"],
        ),
        (&["--pipeline-partition=1,2"], &["pipeline_partition = 1,2", "num_layers = 4"]),
        (&["--ffn-hidden-size=33"], &["ffn_hidden_size = 33", "33 mod 2 = 1"]),
        (
            &["--make-vocab-size-divisible-by=0"],
            &["make_vocab_size_divisible_by = 0", "at least 1"],
        ),
    ];
    for (flags, parts) in cases {
        both_refuse(&site, flags, parts);
    }
}

#[test]
fn flags_and_keys_that_are_unknown_wrong_or_contradict_each_other() {
    let site = Site::new();
    let cases: [(&[&str], &[&str]); 6] = [
        (
            &["--num-layer=2", "--banana=1"],
            &["--num-layer: no such flag; did you mean --num-layers?", "--banana"],
        ),
        (&["--num-layers=four"], &["'four'", "--num-layers"]),
        (
            &["--train-iters=9", "--train-samples=80"],
            &["train_iters (--train-iters)", "train_samples (--train-samples)"],
        ),
        (&["--distributed-timeout-minutes=0"], &["distributed_timeout_minutes = 0"]),
        (&["--distributed-timeout-minutes=nan"], &["distributed_timeout_minutes = NaN"]),
        (&["--rdzv=somewhere"], &["rdzv", "tcp://HOST:PORT"]),
    ];
    for (flags, parts) in cases {
        both_refuse(&site, flags, parts);
    }
    site.edit("hidden_size = 32", "hidden_sizes = 32");
    both_refuse(&site, &[], &["run.toml:3", "hidden_sizes", "hidden_size"]);
    site.edit("hidden_sizes = 32", "hidden_size = \"wide\"");
    both_refuse(&site, &[], &["run.toml:3", "hidden_size", "wide"]);
    site.edit("[model]", "[model");
    both_refuse(&site, &[], &["run.toml:1"]);
}

/// The prompt is continued after all training, which must not be lost.
#[test]
fn a_prompt_that_cannot_be_continued() {
    let site = Site::new();
    both_refuse(&site, &["--prompt="], &["--prompt \"\"", "has 0 tokens"]);
    both_refuse(
        &site,
        &["--prompt=this prompt fills the window"],
        &["--prompt \"this", "16 positions"],
    );
    // Tokens alone do not determine how to encode a text.
    let mut command = site.mark(megatron());
    command.args([
        "preprocess",
        "--input",
        "text.txt",
        "--tokenizer",
        "byte",
        "--output-prefix",
        "x",
    ]);
    assert!(command.output().unwrap().status.success());
    site.edit("tokenizer = \"byte\"", "");
    let flags = ["--data-path=x_text_document", "--vocab-size=257", "--prompt=the"];
    both_refuse(&site, &flags, &["--prompt is text", "--tokenizer"]);
}

#[test]
fn a_world_that_does_not_fit() {
    let site = Site::new();
    let cases = [
        ("WORLD_SIZE", "6", "6 mod 4 = 2"),
        ("RANK", "first", "RANK"),
        ("RANK", "9", "WORLD_SIZE"),
        ("WORLD_SIZE", "-1", "whole number"),
        ("MASTER_PORT", "99999", "not a port"),
    ];
    for (name, value, message) in cases {
        let mut command = site.rank(1, 29500, &[]);
        command.env(name, value);
        refused(&ended(vec![command.spawn().unwrap()], SOON)[0], &[name, value, message]);
    }
    let mut command = site.rank(1, 29500, &[]);
    command.env_remove("WORLD_SIZE");
    refused(&ended(vec![command.spawn().unwrap()], SOON)[0], &["WORLD_SIZE"]);
}

#[test]
fn text_that_is_missing_empty_short_or_binary() {
    let site = Site::new();
    site.write("empty.txt", "");
    site.write("short.txt", "Hi.");
    site.write("binary.txt", "\0\u{1}\0");
    fs::create_dir(site.path("folder")).unwrap();
    let cases = [
        ("missing.txt", "does not exist"),
        ("empty.txt", "is empty"),
        ("folder", "holds no text"),
        ("short.txt", "error: short.txt: the train split has"),
        ("short.txt", "tokens, but one sample takes 17"),
        ("binary.txt", "is not text"),
    ];
    for (path, message) in cases {
        both_refuse(&site, &["--data-path", path], &[message]);
    }
    both_refuse(&site, &["--split=0,1,0"], &["the train split has 0 tokens"]);
}

/// Copies the dataset files of a first run to `data.bin` and `data.idx`.
fn indexed(site: &Site) {
    site.succeed(&["--train-iters=1"]);
    for entry in fs::read_dir(site.path("cache")).unwrap().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(ending @ ("bin" | "idx")) = name.rsplit('.').next() {
            fs::copy(entry.path(), site.path(&format!("data.{ending}"))).unwrap();
        }
    }
}

#[test]
fn an_indexed_dataset_that_is_damaged() {
    let site = Site::new();
    indexed(&site);
    let (bin, idx) =
        (fs::read(site.path("data.bin")).unwrap(), fs::read(site.path("data.idx")).unwrap());
    let flags = ["--data-path=data"];
    let put = |name: &str, bytes: &[u8]| fs::write(site.path(name), bytes).unwrap();

    put("data.bin", &bin[..bin.len() / 2]);
    both_refuse(&site, &flags, &["data.bin"]);
    fs::remove_file(site.path("data.bin")).unwrap();
    both_refuse(&site, &flags, &["data.bin"]);
    put("data.bin", &bin);

    for cut in [0, 8, 30, idx.len() - 1] {
        put("data.idx", &idx[..cut]);
        both_refuse(&site, &flags, &["data.idx"]);
    }
    let mut magic = idx.clone();
    magic[0] ^= 1;
    put("data.idx", &magic);
    both_refuse(&site, &flags, &["data.idx"]);
    // The byte offset of a sequence, far outside the data.
    let mut offset = idx.clone();
    let sequences = u64::from_le_bytes(idx[18..26].try_into().unwrap()) as usize;
    offset[34 + 4 * sequences + 7] = 0x40;
    put("data.idx", &offset);
    both_refuse(&site, &flags, &["data.idx"]);
}

#[test]
fn a_tokenizer_that_is_broken_or_does_not_fit_the_data() {
    let site = Site::new();
    site.write("broken.json", "{\"model\":");
    both_refuse(&site, &["--tokenizer=missing.json"], &["missing.json", "does not exist"]);
    both_refuse(&site, &["--tokenizer=broken.json"], &["broken.json", "tokenizer"]);
    both_refuse(&site, &["--tokenizer=train:10"], &["train:10", "257"]);
    both_refuse(&site, &["--tokenizer=byte", "--vocab-size=100"], &["100", "tokenizer"]);

    indexed(&site);
    let mut bin = fs::read(site.path("data.bin")).unwrap();
    // Token 600, which no byte tokenizer has, somewhere in the training data.
    bin[200..202].copy_from_slice(&600u16.to_le_bytes());
    fs::write(site.path("data.bin"), bin).unwrap();
    fs::remove_file(site.path("metrics.jsonl")).unwrap();
    let flags = ["--data-path=data", "--train-iters=2000"];
    // One after the other: both write the same file of metrics.
    for by_launcher in [false, true] {
        let children = if by_launcher {
            site.ranks(&flags)
        } else {
            vec![site.pretrain(&flags).spawn().unwrap()]
        };
        for output in ended(children, SOON) {
            refused(&output, &["data.bin", "600"]);
        }
    }
    site.assert_nothing_left();
}

#[test]
fn optimizer_state_that_cannot_be_elsewhere() {
    let site = Site::new();
    let words = ["--offload-param=nvme", "--zero-stage=3"];
    both_refuse(&site, &words, &["offload_param = nvme (--offload-param)", "set nvme_path"]);
    let words = ["--offload-param=nvme", "--nvme-path=state"];
    both_refuse(&site, &words, &["offload_param = nvme (--offload-param)", "set zero_stage = 3"]);
    let words = ["--offload-optimizer=none", "--optimizer-cpu-offload"];
    both_refuse(&site, &words, &["offload_optimizer = none", "say different things"]);
    let both = ["--optimizer-cpu-offload", "--offload-optimizer-nvme-path=state"];
    both_refuse(
        &site,
        &both,
        &[
            "optimizer_cpu_offload = true (--optimizer-cpu-offload)",
            "both move the optimizer state",
        ],
    );
}

#[test]
fn saved_activations_that_cannot_be_cut_or_moved() {
    let site = Site::new();
    let full = "--recompute-granularity=full";
    let nvme = [full, "--offload-activations=nvme"];
    both_refuse(
        &site,
        &nvme,
        &["offload_activations = nvme (--offload-activations)", "set nvme_path"],
    );
    both_refuse(
        &site,
        &["--cpu-checkpointing"],
        &["offload_activations = cpu", "set recompute_granularity = full"],
    );
    both_refuse(
        &site,
        &[full, "--partition-activations", "--tensor-model-parallel-size=1"],
        &[
            "distribute_saved_activations = true",
            "has no effect with tensor_model_parallel_size = 1",
        ],
    );
    both_refuse(
        &site,
        &[
            full,
            "--distribute-saved-activations",
            "--tensor-model-parallel-size=2",
            "--sequence-parallel",
        ],
        &["sequence_parallel = true", "already splits saved inputs"],
    );
    both_refuse(
        &site,
        &["--pipeline-partition=type:mlp", "--pipeline-model-parallel-size=2"],
        &["type:mlp matches no type", "its types are Embedding, TransformerLayer, Head"],
    );
}

#[test]
fn flags_of_other_programs_are_told_what_to_use_instead() {
    let deepspeed = "from-deepspeed.md";
    for (flag, instead, page) in [
        (
            "--batch-size=4",
            "--batch-size 4: use --micro-batch-size and --global-batch-size",
            "from-megatron-lm.md",
        ),
        ("--cpu-offload-params", "--offload-param cpu", deepspeed),
    ] {
        let output = megatron().args(["pretrain", flag]).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flag}");
        let text = stderr(&output);
        assert!(text.contains(instead) && text.contains(page), "{flag}: {text}");
    }
    for name in ["--max-new-tokens", "--num-tokens-to-generate", "--max-length", "--max_tokens"] {
        let output =
            megatron().args(["generate", "--load=x", "--prompt=a", name, "5"]).output().unwrap();
        assert_eq!(
            (output.status.code(), stderr(&output).contains("use --num-tokens")),
            (Some(2), true),
            "{name}"
        );
    }
}

#[test]
fn outputs_that_cannot_be_written() {
    let site = Site::new();
    fs::create_dir(site.path("folder")).unwrap();
    fs::create_dir(site.path("occupied")).unwrap();
    site.write("occupied/vs-samples", "A file.");
    for (flag, name) in [
        ("--save=text.txt", "text.txt"),
        ("--save=/proc/none", "/proc/none"),
        ("--metrics=folder", "folder"),
        ("--metrics=/proc/none/metrics.jsonl", "/proc/none"),
        ("--tensorboard-dir=text.txt", "text.txt"),
        ("--tensorboard-dir=/proc/none", "write to the folder /proc/none"),
        ("--tensorboard-dir=occupied", "write to the folder occupied/vs-samples"),
        ("--cache-dir=text.txt", "(cache_dir)"),
        ("--cache-dir=/proc/none", "(cache_dir)"),
        ("--offload-optimizer-nvme-path=text.txt", "text.txt"),
        ("--offload-optimizer-nvme-path=/proc/none", "/proc/none"),
    ] {
        both_refuse(&site, &[flag], &["cannot ", name]);
    }
    both_refuse(
        &site,
        &["--profile", "--profile-dir=text.txt"],
        &["cannot write to the folder text.txt"],
    );
}

#[test]
fn a_model_that_cannot_fit_into_memory() {
    let site = Site::new();
    both_refuse(&site, &["--hidden-size=400000000"], &["hidden_size = 400000000", "GiB of memory"]);
    both_refuse(&site, &["--num-layers=2000000000"], &["num_layers = 2000000000", "GiB of memory"]);
    for vocabulary in ["2000000000", "18446744073709551615"] {
        both_refuse(
            &site,
            &[&format!("--vocab-size={vocabulary}")],
            &["a vocabulary of ", "GiB of memory"],
        );
    }
}

/// One rank alone would fit.
#[test]
fn a_run_whose_ranks_cannot_fit_together() {
    let site = Site::new();
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let bytes = total.trim().trim_end_matches(" kB").parse::<f64>().unwrap() * 1024.0;
    // 4 · 11 · hidden² parameters of 16 bytes each, including gradients and moments.
    let hidden = (0.4 * bytes / 16.0 / 44.0).sqrt() as usize / 8 * 8;
    let flags = [
        &format!("--hidden-size={hidden}")[..],
        "--pipeline-model-parallel-size=1",
        "--data-parallel-size=4",
    ];
    let flags =
        [&flags[..], &["--tensor-model-parallel-size=1", "--max-position-embeddings=16"]].concat();
    let parts = [
        "4 ranks on this machine (tp 1 · cp 1 · pp 1 · dp 4) need at least",
        "physical memory",
        "moments",
    ];
    both_refuse(
        &site,
        &flags,
        &[&parts[..], &["--use-distributed-optimizer (shards masters and moments over 4"]].concat(),
    );
}

#[test]
fn ranks_that_were_started_differently() {
    let site = Site::new();
    let port = crate::site::free_port();
    let flags = |rank| if rank == 2 { vec!["--lr=2e-3", "--seed=7"] } else { vec!["--lr=1e-3"] };
    let children = (0..crate::site::RANKS)
        .map(|rank| site.rank(rank, port, &flags(rank)).spawn().unwrap())
        .collect();
    for output in ended(children, SOON) {
        refused(
            &output,
            &[
                "0.002 on rank 2",
                "seed is 1234 on ranks 0, 1, 3 and 7 on rank 2",
                "start every rank",
            ],
        );
    }
    assert!(!site.path("metrics.jsonl").exists());
    site.assert_nothing_left();
}

#[test]
fn a_port_that_another_program_uses() {
    let site = Site::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let children =
        (0..crate::site::RANKS).map(|rank| site.rank(rank, port, &[]).spawn().unwrap()).collect();
    for output in ended(children, SOON) {
        refused(&output, &[&port.to_string(), "MASTER_PORT"]);
    }
    site.assert_nothing_left();
}

#[test]
fn a_rank_that_never_comes_is_named_in_the_time_that_was_set() {
    let site = Site::new();
    let port = crate::site::free_port();
    let flags = ["--distributed-timeout-minutes=0.03"];
    let children = [0, 1, 3].map(|rank| site.rank(rank, port, &flags).spawn().unwrap()).into();
    for output in ended(children, SOON) {
        refused(&output, &["rendezvous", "rank [2]"]);
        assert!(!stderr(&output).contains("[0"), "{}", stderr(&output));
    }
    site.assert_nothing_left();
}

#[test]
fn a_rank_that_cannot_reach_rank_0_has_failed_but_was_not_started_wrongly() {
    let site = Site::new();
    let rank = site
        .rank(1, crate::site::free_port(), &["--distributed-timeout-minutes=0.03"])
        .spawn()
        .unwrap();
    let output = ended(vec![rank], SOON).remove(0);
    refused(&output, &["cannot reach", "within 2 s", "MASTER_ADDR"]);
    assert_eq!(output.status.code(), Some(1));
    site.assert_nothing_left();
}

#[test]
fn a_limit_of_file_sizes_that_is_too_low_is_named() {
    let site = Site::new();
    let mut command = site.mark(std::process::Command::new("sh"));
    command.args([
        "-c",
        "ulimit -f 1000; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_megatron"),
        "pretrain",
        "run.toml",
    ]);
    refused(&ended(vec![command.spawn().unwrap()], SOON)[0], &["shared memory", "ulimit -f"]);
    site.assert_nothing_left();
}

#[test]
fn a_world_size_of_no_rank_is_told_and_with_an_address_refused() {
    let site = Site::new();
    let alone =
        ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1", "--train-iters=1"];
    let output = site.pretrain(&alone).env("WORLD_SIZE", "8").output().unwrap();
    let text = stderr(&output);
    assert!(
        output.status.success()
            && text.matches("note: WORLD_SIZE=8 is ignored: RANK is not set").count() == 1,
        "{text}"
    );
    let output =
        site.pretrain(&alone).env("WORLD_SIZE", "8").env("MASTER_ADDR", "head").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    refused(
        &output,
        &["WORLD_SIZE=8 and MASTER_ADDR=head are set but RANK is not", "unset WORLD_SIZE"],
    );
}
