//! A writer of SVG: rectangles, lines and texts on white, in colours that colour-blind readers tell
//! apart (Okabe and Ito 2008, <https://jfly.uni-koeln.de/color/>).

use std::fmt::Write;

/// A colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Colour(pub u8, pub u8, pub u8);

impl Colour {
    pub const WHITE: Self = Self(255, 255, 255);
    pub const INK: Self = Self(0x22, 0x22, 0x22);
    pub const PALE: Self = Self(0xf2, 0xf2, 0xf2);
    pub const BLUE: Self = Self(0x00, 0x72, 0xb2);
    #[cfg(test)]
    pub const SKY: Self = Self(0x56, 0xb4, 0xe9);
    pub const ORANGE: Self = Self(0xe6, 0x9f, 0x00);
    pub const YELLOW: Self = Self(0xf0, 0xe4, 0x42);
    pub const GREEN: Self = Self(0x00, 0x9e, 0x73);

    /// Lighter: `part` of `whole` of the way to white.
    pub fn lighter(self, part: usize, whole: usize) -> Self {
        let mixed = |value: u8| {
            let value = usize::from(value);
            (value + (255 - value) * part.min(whole) / whole.max(1)) as u8
        };
        Self(mixed(self.0), mixed(self.1), mixed(self.2))
    }

    /// The colour of a text on this one: dark, or white where that reads better.
    pub fn text_on(self) -> Self {
        // Luma, in thousandths.
        let luma =
            299 * usize::from(self.0) + 587 * usize::from(self.1) + 114 * usize::from(self.2);
        if luma < 100_000 { Self::WHITE } else { Self::INK }
    }

    fn hex(self) -> String {
        format!("#{:02x}{:02x}{:02x}", self.0, self.1, self.2)
    }
}

/// Which point of a text its place names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// A rectangle: left, top, width, height.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Box(pub f64, pub f64, pub f64, pub f64);

/// Height of a text that has no reason to be another; none is smaller.
pub const TEXT: f64 = 12.0;
/// Of headings.
pub const HEADING: f64 = 14.0;

/// About how wide a text of `size` is in a reader's sans-serif font.
pub fn width(text: &str, size: f64) -> f64 {
    0.6 * size * text.chars().count() as f64
}

/// A picture in the making.
#[derive(Clone, Debug)]
pub struct Svg {
    title: String,
    description: String,
    body: String,
}

impl Svg {
    /// An empty picture. Screen readers read `title` and `description`.
    pub fn new(title: &str, description: &str) -> Self {
        Self { title: title.into(), description: description.into(), body: String::new() }
    }

    /// A filled rectangle with a thin dark outline.
    pub fn rect(&mut self, at: Box, fill: Colour) {
        self.outlined(at, fill, Colour::INK);
    }

    /// A filled rectangle.
    pub fn outlined(&mut self, at: Box, fill: Colour, outline: Colour) {
        let Box(x, y, w, h) = at;
        let [x, y, w, h] = [x, y, w, h].map(number);
        let _ = writeln!(
            self.body,
            r#"<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{}" stroke="{}"/>"#,
            fill.hex(),
            outline.hex()
        );
    }

    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: Colour) {
        let [x1, y1, x2, y2] = [from.0, from.1, to.0, to.1].map(number);
        let _ = writeln!(
            self.body,
            r#"<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{}"/>"#,
            colour.hex()
        );
    }

    /// A line of text whose baseline is at `at`.
    pub fn text(&mut self, at: (f64, f64), size: f64, anchor: Anchor, colour: Colour, text: &str) {
        let [x, y, size] = [at.0, at.1, size].map(number);
        let anchor = match anchor {
            Anchor::Start => "",
            Anchor::Middle => r#" text-anchor="middle""#,
            Anchor::End => r#" text-anchor="end""#,
        };
        let weight = if size == number(HEADING) { r#" font-weight="bold""# } else { "" };
        let _ = writeln!(
            self.body,
            r#"<text x="{x}" y="{y}" font-size="{size}"{anchor}{weight} fill="{}">{}</text>"#,
            colour.hex(),
            escaped(text)
        );
    }

    /// A dark text from `at` on.
    pub fn label(&mut self, at: (f64, f64), text: &str) {
        self.text(at, TEXT, Anchor::Start, Colour::INK, text);
    }

    /// A heading from `at` on.
    pub fn heading(&mut self, at: (f64, f64), text: &str) {
        self.text(at, HEADING, Anchor::Start, Colour::INK, text);
    }

    /// A rectangle with a text in its middle, which is left out where there is no room for it.
    pub fn cell(&mut self, at: Box, fill: Colour, text: &str) {
        self.rect(at, fill);
        let Box(x, y, w, h) = at;
        if width(text, TEXT) <= w {
            let middle = (x + w / 2.0, y + h / 2.0 + TEXT * 0.35);
            self.text(middle, TEXT, Anchor::Middle, fill.text_on(), text);
        }
    }

    /// A legend from `at` on, each colour with its meaning; returns where it ends.
    pub fn legend(&mut self, at: (f64, f64), entries: &[(Colour, String)]) -> f64 {
        let (mut x, y) = at;
        for (colour, meaning) in entries {
            self.rect(Box(x, y, 14.0, 14.0), *colour);
            self.label((x + 20.0, y + 11.5), meaning);
            x += 20.0 + width(meaning, TEXT) + 16.0;
        }
        x
    }

    /// The file, of these sizes.
    pub fn finish(self, width: f64, height: f64) -> String {
        let [w, h] = [width, height].map(|size| number(size.ceil()));
        let Self { title, description, body } = self;
        let [title, description] = [title, description].map(|text| escaped(&text));
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{w}\" height=\"{h}\" viewBox=\"0 0 {w} {h}\" \
             role=\"img\" aria-labelledby=\"title desc\" font-family=\"sans-serif\">\n\
             <title id=\"title\">{title}</title>\n<desc id=\"desc\">{description}</desc>\n\
             <rect width=\"{w}\" height=\"{h}\" fill=\"#ffffff\"/>\n{body}</svg>\n"
        )
    }
}

/// A length, to a tenth.
fn number(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").unwrap_or(&text).to_string()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_escaped_and_lengths_are_short() {
        let mut svg = Svg::new("a < b", "\"c\" & d");
        svg.cell(Box(1.0, 2.25, 30.0, 10.04), Colour::BLUE, "1>0");
        let text = svg.finish(40.0, 20.5);
        for part in [
            r#"width="40" height="21" viewBox="0 0 40 21""#,
            r#"<title id="title">a &lt; b</title>"#,
            r#"<desc id="desc">&quot;c&quot; &amp; d</desc>"#,
            r##"<rect x="1" y="2.2" width="30" height="10" fill="#0072b2" stroke="#222222"/>"##,
            r##"fill="#ffffff">1&gt;0</text>"##,
        ] {
            assert!(text.contains(part), "no {part} in {text}");
        }
    }

    #[test]
    fn a_cell_without_room_has_no_text() {
        let mut svg = Svg::new("", "");
        svg.cell(Box(0.0, 0.0, 10.0, 10.0), Colour::SKY, "123");
        assert!(!svg.finish(10.0, 10.0).contains("123"));
    }

    #[test]
    fn texts_stand_out_from_what_is_behind_them() {
        // Contrast of WCAG 2: 4.5 for texts of this size.
        let luminance = |colour: Colour| {
            let linear = |value: u8| {
                let value = f64::from(value) / 255.0;
                if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
            };
            0.2126 * linear(colour.0) + 0.7152 * linear(colour.1) + 0.0722 * linear(colour.2)
        };
        for colour in
            [Colour::BLUE, Colour::SKY, Colour::ORANGE, Colour::YELLOW, Colour::GREEN, Colour::PALE]
        {
            for part in 0..4 {
                let fill = colour.lighter(part, 4);
                let [a, b] = [fill, fill.text_on()].map(|colour| luminance(colour) + 0.05);
                assert!(a.max(b) / a.min(b) >= 4.5, "{fill:?}");
            }
        }
    }
}
