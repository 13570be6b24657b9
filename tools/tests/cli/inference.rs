//! `megatron generate` and `megatron eval`: the same on any layout, and clear where they cannot work.

use crate::site::Site;
use crate::support::{megatron, stderr, stdout};

/// `megatron` with `words` in the site; what it printed.
fn run(site: &Site, words: &[&str]) -> String {
    let mut command = site.mark(megatron());
    let output = command.args(words).output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    stdout(&output)
}

fn refused(site: &Site, words: &[&str]) -> String {
    let mut command = site.mark(megatron());
    let output = command.args(words).output().unwrap();
    assert!(!output.status.success());
    stderr(&output)
}

#[test]
fn text_and_loss_do_not_depend_on_the_layout() {
    let site = Site::new();
    site.succeed(&["--save=saved"]);
    let generate = ["generate", "--load=saved", "--prompt=the", "--num-tokens=8", "--top-k=20"];
    let evaluate = ["eval", "--load=saved", "--data-path=text.txt", "--cache-dir=cache"];
    let layouts: [&[&str]; 3] = [
        &[],
        &["--tensor-model-parallel-size=2"],
        &["--pipeline-model-parallel-size=2", "--tensor-model-parallel-size=2"],
    ];
    let texts = layouts.map(|layout| run(&site, &[&generate, layout].concat()));
    assert!(texts[0].starts_with("the") && texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    let losses = layouts.map(|layout| run(&site, &[&evaluate, layout].concat()));
    assert!(losses[0].contains("| loss ") && losses.iter().all(|loss| *loss == losses[0]), "{losses:?}");
    let replicas = run(&site, &[&evaluate[..], &["--data-parallel-size=2", "--micro-batch-size=3"]].concat());
    assert_eq!(replicas, losses[0]);
    site.assert_nothing_left();
}

#[test]
fn what_cannot_be_used_is_named() {
    let site = Site::new();
    site.succeed(&["--save=saved", "--train-iters=1"]);
    let prompt = "--prompt=the";
    for (words, named) in [
        (vec!["generate", "--load=nothing", prompt], "nothing"),
        (vec!["generate", "--load=saved", "--prompt=this prompt fills the window"], "16 positions"),
        (vec!["generate", "--load=saved", prompt, "--tensor-model-parallel-size=3"], "query heads"),
        (vec!["generate", "--load=saved", prompt, "--temperature=-1"], "--temperature"),
        (vec!["generate", "--load=saved", prompt, "--tokenizer=none.json"], "none.json"),
        (vec!["eval", "--load=saved", "--data-path=missing.txt"], "missing.txt"),
        (vec!["eval", "--load=saved", "--data-path=text.txt", "--seq-length=99"], "16 positions"),
    ] {
        let message = refused(&site, &words);
        assert!(message.contains(named) && message.starts_with("error: "), "{words:?}: {message}");
    }
    site.assert_nothing_left();
}

#[test]
fn hugging_face_models_are_read_as_they_are() {
    let site = Site::new();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/llama-tiny");
    let (load, data) = (format!("--load={model}"), format!("--data-path={model}/data_text_document"));
    let alone = run(&site, &["eval", &load, &data]);
    assert!(alone.contains("160 samples of 64 tokens"), "{alone}");
    assert_eq!(run(&site, &["eval", &load, &data, "--tensor-model-parallel-size=2"]), alone);
    site.assert_nothing_left();
}
