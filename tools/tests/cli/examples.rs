//! The files in `examples` that users copy: the program accepts everything in them.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

use crate::site::{SOON, Site, ended, free_port};
use crate::support::{megatron, stderr, stdout};
use crate::yaml;

/// Run files, each with flags that make its model small enough for a test. The last one trains on
/// the hosts of [`HOSTFILE`].
const RUN_FILES: [(&str, &str); 4] = [
    ("examples/quickstart.toml", "--data-path text.txt --tokenizer byte --hidden-size 24"),
    ("examples/llama.toml", SMALL_LLAMA),
    ("examples/fine-tune.toml", "--seq-length 32 --data-parallel-size 2"),
    (RUN_FILE, SMALL_LLAMA),
];
const RUN_FILE: &str = "examples/two-machines/run.toml";
const HOSTFILE: &str = "examples/two-machines/hostfile";
const SLURM: &str = "examples/two-machines/slurm.sh";
const KUBERNETES: &str = "examples/two-machines/kubernetes.yaml";
const DOCKERFILE: &str = "examples/Dockerfile";

const SMALL_LLAMA: &str = "--num-layers 4 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 8 \
    --num-query-groups 4 --seq-length 32";
const SHORT: &str = "--train-iters 2 --lr-warmup-iters 1 --micro-batch-size 1 --global-batch-size 4 \
    --eval-iters 1 --log-interval 1 --cache-dir cache --device cpu";
/// The machines of the two-machines example, and the ranks on each.
const MACHINES: usize = 2;
const RANKS_OF_EACH: usize = 8;

/// Runs the given line on this machine, and records the host.
const SSH: &str = r#"#!/bin/sh
for word; do host=$line; line=$word; done
echo "$host" >> ssh.hosts
exec sh -c "$line"
"#;
/// Records its words and the variables that ranks would inherit, and ends as instructed.
const SRUN: &str = r#"#!/bin/sh
printf '%s\n' "$@" > srun.words
env > srun.variables
exit "$SRUN_ENDS_WITH"
"#;
const SCONTROL: &str = "#!/bin/sh\necho \"$@\" > scontrol.words\n";

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn text_of(example: &str) -> String {
    fs::read_to_string(project().join(example)).unwrap()
}

/// A folder with the examples, a corpus, and a Hugging Face model with its tokenizer.
fn site() -> Site {
    let site = Site::new();
    symlink(project().canonicalize().unwrap().join("examples"), site.path("examples")).unwrap();
    let documents: String = (0..200)
        .map(|n| {
            format!("{{\"text\": \"All work and no play makes a dull corpus, {n} times.\"}}\n")
        })
        .collect();
    fs::create_dir_all(site.path("data")).unwrap();
    site.write("data/documents.jsonl", &documents);
    let mut gzip = site.mark(Command::new("sh"));
    gzip.args(["-c", "gzip < data/documents.jsonl > data/corpus.jsonl.gz"]);
    assert!(gzip.status().unwrap().success());
    fs::create_dir_all(site.path("hf/base")).unwrap();
    for file in ["config.json", "model.safetensors"] {
        let fixture = project().join("tests/fixtures/llama-tiny").join(file);
        fs::copy(fixture, site.path("hf/base").join(file)).unwrap();
    }
    let tokenizer = "tokenizer train --vocab-size 300 --input data/documents.jsonl --output hf/base/tokenizer.json";
    succeed(&site, &words_of(tokenizer));
    site
}

fn words_of(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_string).collect()
}

fn run(site: &Site, words: &[String]) -> Output {
    let mut command = site.mark(megatron());
    command.args(words);
    ended(vec![command.spawn().unwrap()], 12 * SOON).remove(0)
}

fn succeed(site: &Site, words: &[String]) -> Output {
    let output = run(site, words);
    assert!(output.status.success(), "{words:?}: {}{}", stdout(&output), stderr(&output));
    output
}

fn executable(site: &Site, name: &str, script: &str) {
    site.write(name, script);
    fs::set_permissions(site.path(name), fs::Permissions::from_mode(0o755)).unwrap();
}

/// The commands in a file's first comment: for each, the words after the name of `program`.
fn commands(text: &str, program: &str) -> Vec<Vec<String>> {
    let mut lines = text.lines().skip_while(|line| line.starts_with("#!"));
    let comment: Vec<&str> = lines.by_ref().map_while(|line| line.strip_prefix('#')).collect();
    let comment = comment.join("\n").replace("\\\n", " ");
    let given = comment.lines().filter_map(|line| line.strip_prefix("   "));
    given
        .filter_map(|line| line.strip_prefix(program)?.strip_prefix(' '))
        .inspect(|line| assert!(!line.contains(['"', '\'', '$']), "this needs a shell: {line}"))
        .map(words_of)
        .collect()
}

/// The words of `megatron pretrain` that `megatron launch` starts.
fn launched(words: &[String]) -> &[String] {
    let at = words.iter().position(|word| word == "--").expect("`--` before the command");
    assert_eq!(words[at + 1..at + 3], ["megatron", "pretrain"], "{words:?}");
    &words[at + 2..]
}

/// Asserts that rank 0 accepts everything in `words` of `pretrain` except the data, which are
/// opened after settings are checked.
fn assert_settings_are_taken(site: &Site, words: &[String]) {
    let mut command = site.mark(megatron());
    command.args(words).args(["--data-path", "no-such-data"]);
    let ranks = MACHINES * RANKS_OF_EACH;
    command.envs([("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", &ranks.to_string())]);
    command.env("LOCAL_WORLD_SIZE", RANKS_OF_EACH.to_string());
    command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")]);
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert!(text.contains("error: no-such-data: does not exist"), "{words:?}: {text}");
}

/// The files of `folder` and its subfolders, by path in the project.
fn files(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries
        .flat_map(|path| {
            let name = path.strip_prefix(project()).unwrap().to_str().unwrap().to_string();
            if path.is_dir() { files(&path) } else { BTreeSet::from([name]) }
        })
        .collect()
}

#[test]
fn every_example_begins_with_its_command_and_is_checked_here() {
    let known = RUN_FILES.map(|(name, _)| name);
    let others = [HOSTFILE, SLURM, KUBERNETES, DOCKERFILE];
    let known = BTreeSet::from_iter(known.into_iter().chain(others).map(str::to_string));
    let mut found = files(&project().join("examples"));
    found.retain(|name| !name.ends_with(".rs") && !name.starts_with("examples/data/"));
    assert_eq!(found, known);
    let programs = ["cargo", "megatron", "sbatch", "kubectl", "docker"];
    for name in &found {
        let text = text_of(name);
        let first = text.lines().find(|line| !line.starts_with("#!")).unwrap();
        assert!(first.starts_with("# "), "{name}: {first}");
        let starts =
            |line: &str| programs.iter().any(|one| line.starts_with(&format!("#   {one} ")));
        assert!(text.lines().any(starts), "{name} gives no command");
        if name != "examples/quickstart.toml" {
            assert!(text.contains("# Change: ") || text.contains(". Change: "), "{name}");
            let long = text.lines().find(|line| line.chars().count() > 100);
            assert!(long.is_none(), "{name}: more than 100 columns: {long:?}");
        }
    }
}

/// Uses the sizes of the files; the data do not exist.
#[test]
fn run_files_are_taken_as_they_are() {
    let site = site();
    for (name, _) in RUN_FILES {
        // The model that is fine-tuned here has 64 positions.
        let length = if name.ends_with("fine-tune.toml") { "--seq-length 32" } else { "" };
        let words = format!("pretrain {name} --data-path no-such-data {length}");
        let output = run(&site, &words_of(&words));
        let text = stderr(&output);
        assert!(text.contains("error: no-such-data: does not exist"), "{name}: {text}");
    }
}

#[test]
fn the_commands_of_run_files_train_a_small_model() {
    for (name, sizes) in RUN_FILES {
        let site = site();
        let text = text_of(name);
        let (mut given, mut trained) = (commands(&text, "megatron"), false);
        given.extend(commands(&text, "cargo run --release --"));
        if name == RUN_FILE {
            given.push(words_of(&format!(
                "pretrain {RUN_FILE} --data-path text.txt --tokenizer byte"
            )));
        }
        for mut words in given {
            if words[0] == "pretrain" {
                assert_eq!(words[1], name);
                words.extend(words_of(&format!("{SHORT} {sizes}")));
                trained = true;
            }
            let output = succeed(&site, &words);
            let said = stdout(&output) + &stderr(&output);
            assert!(!said.contains("no effect here"), "{name}: {said}");
        }
        assert!(trained, "{name}");
        // The export of the fine-tuned model.
        assert_eq!(name.ends_with("fine-tune.toml"), site.path("hf/fine-tuned").exists());
        site.assert_nothing_left();
    }
}

#[test]
fn the_hosts_of_the_hostfile_train_together() {
    let site = site();
    executable(&site, "ssh", SSH);
    let [words] = &commands(&text_of(HOSTFILE), "megatron")[..] else { panic!("one command") };
    assert_eq!(launched(words), ["pretrain", RUN_FILE]);
    let own = format!(
        "launch --ssh-program {} --master-addr 127.0.0.1 --master-port {}",
        site.path("ssh").display(),
        free_port()
    );
    let small = format!("{SHORT} {SMALL_LLAMA} --data-path text.txt --tokenizer byte");
    let words = [words_of(&own), words[1..].to_vec(), words_of(&small)].concat();
    let said = stdout(&succeed(&site, &words));
    assert!(said.contains("tp 4 · pp 2 · dp 2 · ZeRO-1 · sequence parallel"), "{said}");
    let asked = fs::read_to_string(site.path("ssh.hosts")).unwrap();
    assert_eq!(BTreeSet::from_iter(asked.lines()), BTreeSet::from(["node0", "node1"]));
    site.assert_nothing_left();
}

/// The value of `--NAME=VALUE` in the `#SBATCH` lines.
fn sbatch(script: &str, name: &str) -> String {
    let options = script.lines().filter_map(|line| line.strip_prefix("#SBATCH --"));
    let values: Vec<&str> =
        options.filter_map(|line| line.strip_prefix(name)?.strip_prefix('=')).collect();
    assert_eq!(values.len(), 1, "--{name}");
    values[0].to_string()
}

#[test]
fn the_script_for_slurm_starts_a_rank_a_gpu_and_is_queued_again_after_saving() {
    let script = text_of(SLURM);
    assert_eq!(sbatch(&script, "nodes"), MACHINES.to_string());
    assert_eq!(sbatch(&script, "ntasks-per-node"), RANKS_OF_EACH.to_string());
    assert_eq!(sbatch(&script, "gpus-per-node"), RANKS_OF_EACH.to_string());
    // sbatch stops reading options at the first command.
    let mut rest = script.lines().skip_while(|line| line.starts_with('#') || line.is_empty());
    assert!(rest.all(|line| !line.starts_with("#SBATCH")));
    assert!(Command::new("bash").arg("-n").arg(project().join(SLURM)).status().unwrap().success());
    let site = site();
    [
        ("srun", SRUN),
        ("scontrol", SCONTROL),
        ("openssl", "#!/bin/sh\necho a-secret-of-24-letters\n"),
    ]
    .iter()
    .for_each(|(name, text)| executable(&site, name, text));
    let path = format!(
        "{}:{}",
        site.path("srun").parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    for (ends_with, code, requeued) in [(0, 0, false), (1, 1, false), (138, 0, true)] {
        let mut command = site.mark(Command::new("bash"));
        command.arg(SLURM).env("PATH", &path).env("SRUN_ENDS_WITH", ends_with.to_string());
        let output = command.env("SLURM_JOB_ID", "77").env_remove("MEGATRON_RUN_SECRET").output();
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", stderr(&output));
        let words = fs::read_to_string(site.path("scontrol.words")).unwrap_or_default();
        assert_eq!(words, if requeued { "requeue 77\n" } else { "" });
    }
    let variables = fs::read_to_string(site.path("srun.variables")).unwrap();
    for variable in [
        "MEGATRON_RUN_SECRET=a-secret-of-24-letters",
        "CUDA_DEVICE_MAX_CONNECTIONS=32",
        "NCCL_RUNTIME_CONNECT=0",
        "SRUN_CPUS_PER_TASK=8",
    ] {
        assert!(variables.lines().any(|line| line == variable), "{variable}");
    }
    assert_eq!(sbatch(&script, "cpus-per-task"), "8");
    let words = fs::read_to_string(site.path("srun.words")).unwrap();
    let words: Vec<String> = words.lines().map(str::to_string).collect();
    assert_eq!(words[..2], ["megatron", "pretrain"]);
    assert_settings_are_taken(&site, &words[1..]);
}

/// The only document of `kind`.
fn document<'a>(documents: &'a [Value], kind: &str) -> &'a Value {
    let found: Vec<&Value> =
        documents.iter().filter(|one| one["kind"].as_str() == Some(kind)).collect();
    assert_eq!(found.len(), 1, "{kind}");
    found[0]
}

/// The entry of a list with the name `name`.
fn named<'a>(list: &'a Value, name: &str) -> &'a Value {
    let found = list.as_array().unwrap().iter().find(|one| one["name"].as_str() == Some(name));
    found.unwrap_or_else(|| panic!("no {name} in {list:?}"))
}

#[test]
fn the_pods_of_kubernetes_meet_and_have_time_to_save() {
    let documents = yaml::documents(&text_of(KUBERNETES));
    let [service, claim, job] =
        ["Service", "PersistentVolumeClaim", "Job"].map(|kind| document(&documents, kind));
    let name_of = |one: &Value| one["metadata"]["name"].as_str().unwrap().to_string();
    let (spec, pod) = (&job["spec"], &job["spec"]["template"]["spec"]);
    // One pod for each machine, all at once.
    assert_eq!(spec["completionMode"].as_str(), Some("Indexed"));
    assert_eq!(spec["completions"].as_i64(), Some(MACHINES as i64));
    assert_eq!(spec["parallelism"], spec["completions"]);
    // Pods get host names from a headless service that selects them.
    assert_eq!(service["spec"]["clusterIP"].as_str(), Some("None"));
    assert_eq!(service["spec"]["selector"]["job-name"].as_str(), Some(&*name_of(job)));
    assert_eq!(pod["subdomain"].as_str(), Some(&*name_of(service)));
    // Checkpoints are on one volume, and /dev/shm is memory.
    let container = &pod["containers"][0];
    assert_eq!(claim["spec"]["accessModes"][0].as_str(), Some("ReadWriteMany"));
    let shared = named(&pod["volumes"], "shared");
    assert_eq!(shared["persistentVolumeClaim"]["claimName"].as_str(), Some(&*name_of(claim)));
    let mounted = |name| named(&container["volumeMounts"], name)["mountPath"].as_str().unwrap();
    assert_eq!(container["workingDir"].as_str(), Some(mounted("shared")));
    assert_eq!(mounted("shared-memory"), "/dev/shm");
    let memory = &named(&pod["volumes"], "shared-memory")["emptyDir"]["medium"];
    assert_eq!(memory.as_str(), Some("Memory"));
    // The policy on exit codes needs both.
    assert_eq!(pod["restartPolicy"].as_str(), Some("Never"));
    let rules = spec["podFailurePolicy"]["rules"].as_array().unwrap();
    for rule in rules.iter().filter(|rule| !rule["onExitCodes"].is_null()) {
        assert_eq!(rule["onExitCodes"]["containerName"], container["name"]);
    }
    let secret = &named(&container["env"], "MEGATRON_RUN_SECRET")["valueFrom"]["secretKeyRef"];
    let made = format!(
        "#   kubectl create secret generic {} --from-literal={}=",
        secret["name"].as_str().unwrap(),
        secret["key"].as_str().unwrap()
    );
    assert!(text_of(KUBERNETES).contains(&made), "{made}");

    // The launchers of both machines; each starts its ranks.
    let words: Vec<String> = container["args"]
        .as_array()
        .unwrap()
        .iter()
        .map(|word| word.as_str().unwrap().into())
        .collect();
    let site = site();
    let host = format!("{}-0.{}", name_of(job), name_of(service));
    let mut seen = BTreeSet::new();
    for index in 0..MACHINES {
        let index = index.to_string();
        let mut words: Vec<String> =
            words.iter().map(|word| word.replace("$(JOB_COMPLETION_INDEX)", &index)).collect();
        words.truncate(words.iter().position(|word| word == "--").unwrap() + 1);
        let ask = "echo $RANK of $WORLD_SIZE at $MASTER_ADDR";
        words.extend(["sh", "-c", ask].map(str::to_string));
        seen.extend(stdout(&succeed(&site, &words)).lines().map(str::to_string));
    }
    let ranks = MACHINES * RANKS_OF_EACH;
    let line = |rank: usize| format!("[{rank}]: {rank} of {ranks} at {host}");
    assert_eq!(seen, BTreeSet::from_iter((0..ranks).map(line)));
    let limits = &container["resources"]["limits"];
    assert_eq!(limits["nvidia.com/gpu"].as_i64(), Some(RANKS_OF_EACH as i64));
    let grace = words.iter().find_map(|word| word.strip_prefix("--grace-period=")).unwrap();
    let grace: i64 = grace.parse().unwrap();
    assert!(grace >= 60 && pod["terminationGracePeriodSeconds"].as_i64() > Some(grace + 30));
    // Its run file comes from the ConfigMap that a command in the comment creates.
    let (run_file, words) = (Path::new(RUN_FILE), launched(&words).to_vec());
    let mounted = Path::new(mounted("run-file")).join(run_file.file_name().unwrap());
    assert_eq!(words, ["pretrain", mounted.to_str().unwrap()]);
    let map = named(&pod["volumes"], "run-file")["configMap"]["name"].as_str().unwrap();
    let made = format!("#   kubectl create configmap {map} --from-file={RUN_FILE}\n");
    assert!(text_of(KUBERNETES).contains(&made), "{made}");
    assert_settings_are_taken(&site, &words_of(&format!("pretrain {RUN_FILE}")));
}

#[test]
fn the_image_has_this_projects_rust_and_the_user_that_pods_run_as() {
    let dockerfile = text_of(DOCKERFILE);
    let argument = |name: &str| {
        let lines = dockerfile.lines().filter_map(|line| line.strip_prefix("ARG "));
        let mut values = lines.filter_map(|line| line.strip_prefix(name)?.strip_prefix('='));
        values.next().unwrap_or_else(|| panic!("ARG {name}")).to_string()
    };
    assert_eq!(argument("RUST"), env!("CARGO_PKG_RUST_VERSION"));
    // candle's kernels and this program's are built for this version (docs/guide/install.md).
    assert!(argument("CUDA").starts_with("13."));
    let has = |line: &str| dockerfile.lines().any(|other| other == line);
    assert!(has("ENTRYPOINT [\"megatron\"]"));
    // Every stage that an argument selects exists for each of its values.
    for device in ["cpu", "cuda"] {
        for stage in ["build", "runtime"] {
            let name = format!(" AS {stage}-{device}");
            assert!(dockerfile.lines().any(|line| line.ends_with(&name)), "{name}");
        }
    }
    let pods = yaml::documents(&text_of(KUBERNETES));
    let user = &document(&pods, "Job")["spec"]["template"]["spec"]["securityContext"]["runAsUser"];
    let user = user.as_i64().unwrap();
    assert!(has(&format!("USER {user}:{user}")), "USER {user}");
}
