//! The output of a run on a terminal.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd};
use std::process::Stdio;

use crate::site::{SOON, Site, ended};
use crate::support::kill;

/// Both ends of a pseudoterminal: the keyboard side and the screen side.
fn terminal() -> (File, File) {
    // SAFETY: the descriptor is new and owned only here.
    let keys = unsafe { File::from_raw_fd(libc::posix_openpt(libc::O_RDWR | libc::O_NOCTTY)) };
    let mut name = [0; 64];
    // SAFETY: the descriptor is open, and the name is written into the buffer.
    let made = unsafe {
        libc::grantpt(keys.as_raw_fd()) == 0
            && libc::unlockpt(keys.as_raw_fd()) == 0
            && libc::ptsname_r(keys.as_raw_fd(), name.as_mut_ptr(), name.len()) == 0
    };
    assert!(made);
    // SAFETY: the system terminates the name with 0.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_str().unwrap();
    let screen = OpenOptions::new().read(true).write(true).open(name).unwrap();
    (keys, screen)
}

/// The output on a terminal of a run with `flags`, until it ends or, if `stops`, was asked to stop.
fn shown(site: &Site, flags: &[&str], stops: bool) -> String {
    let (mut keys, screen) = terminal();
    let flags =
        [&["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1"], flags].concat();
    let mut command = site.pretrain(&flags);
    let run = command.stdout(Stdio::from(screen)).spawn().unwrap();
    // The other end closes with the program.
    drop(command);
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        // Reading a terminal that no process has open is an error.
        let _ = keys.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    });
    if stops {
        site.wait_for_step(5);
        kill(run.id(), "INT");
    }
    ended(vec![run], SOON);
    reader.join().unwrap()
}

#[test]
fn lines_of_losses_stay_above_the_bar_which_ends_without_a_time_that_is_left() {
    for (flags, stops) in [(&["--train-iters=7"][..], false), (&["--train-iters=1000000"], true)] {
        let site = Site::new();
        let text = shown(&site, &[flags, &["--log-interval=3"]].concat(), stops);
        let lines: Vec<&str> = text.lines().filter(|line| line.contains("step 3: loss ")).collect();
        assert!(
            lines.len() == 1 && lines[0].contains(" tokens/s") && lines[0].contains("grad norm"),
            "{text:?}"
        );
        assert!(!text.contains("step 4: loss"), "{text:?}");
        assert_eq!(text.contains("step 7: loss"), !stops, "{text:?}");
        assert!(text.contains(" · ETA "), "{text:?}");
        assert!(!text.contains("  · ETA"), "nothing is known before the first step: {text:?}");
        let last =
            text.trim_end().rsplit(['\r', '\n']).find(|part| part.contains("tokens/s")).unwrap();
        assert!(
            last.contains(if stops { "/1000000 loss" } else { "7/7 loss" })
                && !last.contains("ETA"),
            "{text:?}"
        );
    }
}
