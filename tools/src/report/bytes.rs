//! A progress bar over bytes, for commands that read or write large files.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Shows finished bytes on a terminal, on standard error; otherwise shows nothing.
pub struct ByteBar(ProgressBar);

impl ByteBar {
    /// A bar of `total` bytes, with the text `what`.
    pub fn new(what: &'static str, total: u64) -> Self {
        let bar = ProgressBar::new(total).with_message(what);
        let template = "{msg} {wide_bar:.cyan/blue} {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} ETA {eta}";
        bar.set_style(
            ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    /// Adds finished bytes.
    pub fn add(&self, bytes: u64) {
        self.0.inc(bytes);
    }

    /// Removes the bar from the screen.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

impl Drop for ByteBar {
    fn drop(&mut self) {
        // Before an error message is printed.
        self.finish();
    }
}
