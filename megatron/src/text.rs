//! Cleans text from other programs.

/// `text` without characters that a terminal would interpret: control characters, including line
/// ends, and marks that change the writing direction. Bytes that are not UTF-8 become U+FFFD. Text
/// that ranks send about themselves passes through this function before it is printed.
pub fn printable(text: impl AsRef<[u8]>) -> String {
    let show = |c: char| match c {
        '\n' | '\r' | '\t' => ' ',
        '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => char::REPLACEMENT_CHARACTER,
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    String::from_utf8_lossy(text.as_ref()).chars().map(show).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_finds_nothing_to_act_on() {
        assert_eq!(
            printable("ä\u{1b}[2J\nb\u{9b}c\u{202e}d\0"),
            "ä\u{fffd}[2J b\u{fffd}c\u{fffd}d\u{fffd}"
        );
    }
}
