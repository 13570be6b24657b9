//! `megatron generate` and `megatron eval`: the same on any layout, with clear errors.

use crate::site::Site;
use crate::support::{megatron, stderr, stdout};

/// The output of `megatron` with `words` in the site.
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
    assert_eq!(stdout(&output), "");
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
    assert!(
        losses[0].contains("| loss ") && losses.iter().all(|loss| *loss == losses[0]),
        "{losses:?}"
    );
    for layout in [
        &["--data-parallel-size=2", "--micro-batch-size=3"][..],
        &["--context-parallel-size=2", "--micro-batch-size=3"],
        &[
            "--context-parallel-size=2",
            "--data-parallel-size=2",
            "--pipeline-model-parallel-size=2",
        ],
    ] {
        assert_eq!(run(&site, &[&evaluate, layout].concat()), losses[0], "{layout:?}");
    }
    site.assert_nothing_left();
}

#[test]
fn generation_says_how_fast_it_was_beside_its_text() {
    let site = Site::new();
    site.succeed(&["--save=saved", "--train-iters=2"]);
    for prompts in [&["--prompt=the"][..], &["--prompt=the", "--prompt=of"]] {
        let words = ["generate", "--load=saved", "--num-tokens=8"];
        let output = site.mark(megatron()).args([&words, prompts].concat()).output().unwrap();
        let (said, new) = (stderr(&output), 7 * prompts.len());
        assert!(output.status.success() && said.contains(&format!("s, {new} more in ")), "{said}");
        assert!(
            said.contains(" tokens in prompts read in ") && said.trim_end().ends_with(" a second"),
            "{said}"
        );
    }
}

#[test]
fn a_continuation_that_the_models_positions_end_says_so() {
    let site = Site::new();
    let run =
        site.succeed(&["--save=saved", "--train-iters=2", "--prompt=a text", "--prompt-tokens=40"]);
    let note = "note: the continuation ends after 10 tokens of 40: with the prompt's 6 they fill the model's 16 positions";
    assert!(stdout(&run).contains(note), "{}", stdout(&run));
    for prompts in [&["--prompt=a text"][..], &["--prompt=a text", "--prompt=of"]] {
        let said = |tokens: &str| {
            let words = ["generate", "--load=saved", "--temperature=0", tokens];
            let output = site.mark(megatron()).args([&words, prompts].concat()).output().unwrap();
            stderr(&output)
        };
        let text = said("--num-tokens=40");
        assert_eq!(text.matches("note: the continuation ends").count(), prompts.len(), "{text}");
        assert!(text.contains(note), "{text}");
        assert!(!said("--num-tokens=10").contains("note: "));
    }
}

/// As in the example of its help.
#[test]
fn a_part_is_evaluated_though_the_others_are_empty() {
    let site = Site::new();
    site.succeed(&["--save=saved", "--train-iters=2"]);
    let of = |split: &str, part: &str| {
        let (split, part) = (format!("--split={split}"), format!("--part={part}"));
        let words =
            ["eval", "--load=saved", "--data-path=text.txt", "--cache-dir=cache", &split, &part];
        run(&site, &words).split(" | ").nth(1).unwrap().to_string()
    };
    let whole = of("100,0,0", "train");
    assert_eq!([of("0,100,0", "valid"), of("0,0,100", "test")], [whole.clone(), whole]);
    let empty = [
        "eval",
        "--load=saved",
        "--data-path=text.txt",
        "--cache-dir=cache",
        "--split=100,0,0",
        "--part=test",
    ];
    assert!(refused(&site, &empty).contains("the test split has 0 tokens"));
}

#[test]
fn models_are_trained_and_used_in_16_bits() {
    let site = Site::new();
    for precision in ["--bf16", "--fp16"] {
        let saved = format!("saved{precision}");
        let log =
            stdout(&site.succeed(&[precision, &format!("--save={saved}"), "--train-iters=5"]));
        let scale =
            if precision == "--fp16" { "| loss scale: 65536.0 |" } else { "| loss scale: 1.0 |" };
        assert!(
            log.contains(scale) && log.contains("peak memory: ") && log.contains(" on rank 3"),
            "{log}"
        );
        let load = format!("--load={saved}");
        let eval = |flags: &[&str]| {
            let text = run(
                &site,
                &[&["eval", &load, "--data-path=text.txt", "--cache-dir=cache"], flags].concat(),
            );
            let loss = text.split("| loss ").nth(1).and_then(|rest| rest.split(' ').next());
            loss.and_then(|loss| loss.parse::<f64>().ok()).unwrap_or_else(|| panic!("{text}"))
        };
        let (wide, narrow) = (eval(&[]), eval(&[precision]));
        assert!(
            (narrow / wide - 1.0).abs() < 0.01,
            "{precision}: {narrow} in 16 bits, {wide} in 32"
        );
        let text = run(&site, &["generate", &load, "--prompt=the", "--num-tokens=8", precision]);
        assert!(text.starts_with("the"), "{text}");
        // The checkpoint is fp32, and the run continues in fp32.
        let log = stdout(&site.succeed(&[&load, &format!("--save={saved}"), "--train-iters=6"]));
        assert!(
            log.contains(&format!("trained in {}; this run continues in fp32", &precision[2..])),
            "{log}"
        );
    }
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
        (
            vec![
                "eval",
                "--load=saved",
                "--data-path=text.txt",
                "--seq-length=15",
                "--context-parallel-size=2",
            ],
            "--context-parallel-size 2 does not divide the 15 tokens",
        ),
        (
            vec!["eval", "--load=saved", "--data-path=text.txt", "--context-parallel-size=4"],
            "2 query groups",
        ),
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
    let (load, data) =
        (format!("--load={model}"), format!("--data-path={model}/data_text_document"));
    let alone = run(&site, &["eval", &load, &data]);
    assert!(alone.contains("160 samples of 64 tokens"), "{alone}");
    assert_eq!(run(&site, &["eval", &load, &data, "--tensor-model-parallel-size=2"]), alone);
    site.assert_nothing_left();
}

/// Models pad their vocabularies; after so few steps, padding rows are as likely as any other.
#[test]
fn ids_that_the_tokenizer_does_not_have_are_never_drawn() {
    let site = Site::new();
    site.succeed(&["--save=saved", "--train-iters=1", "--vocab-size=2048"]);
    let words = [
        "generate",
        "--load=saved",
        "--prompt=the",
        "--num-tokens=12",
        "--tensor-model-parallel-size=2",
    ];
    let output = site.mark(megatron()).args(words).output().unwrap();
    let (text, said) = (stdout(&output), stderr(&output));
    // Every byte gives a character, perhaps a replacement character, or waits for further bytes.
    assert!(output.status.success() && text.trim_end().len() > "the".len() + 4, "{text:?}: {said}");
    assert!(said.contains("11 more in"), "{said}");
}
