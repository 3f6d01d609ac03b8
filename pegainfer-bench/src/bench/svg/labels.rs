//! Places labels in a plot so that they overlap neither each other nor dots.

use std::fmt::Write;

/// Mean width of a character and height of a line, in parts of the font size.
const CHARACTER: (f64, f64) = (0.58, 1.0);
/// Pixels between a dot and its label.
const GAP: f64 = 3.0;

/// A rectangle in pixels.
#[derive(Debug, Clone, Copy)]
pub struct Extent {
    left: f64,
    top: f64,
    right: f64,
    bottom: f64,
}

impl Extent {
    /// The square around a circle.
    pub fn around(x: f64, y: f64, radius: f64) -> Self {
        Self { left: x - radius, top: y - radius, right: x + radius, bottom: y + radius }
    }

    /// The rectangle between its upper left and its lower right corner.
    pub fn between((left, top): (f64, f64), (right, bottom): (f64, f64)) -> Self {
        Self { left, top, right, bottom }
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }
}

/// The labels of a plot area whose upper left corner is the origin.
#[derive(Debug)]
pub struct Labels {
    area: (f64, f64),
    font: f64,
    taken: Vec<Extent>,
}

impl Labels {
    /// No labels yet in an area of this width and height.
    pub fn new(area: (f64, f64), font: f64) -> Self {
        Self { area, font, taken: Vec::new() }
    }

    /// Keeps labels away from a rectangle.
    pub fn block(&mut self, taken: Extent) {
        self.taken.push(taken);
    }

    /// Writes the label at the first of `places`, each the left end of its baseline, at which it is inside of the area and overlaps
    /// nothing. Without such a place it is left out.
    pub fn place(&mut self, out: &mut String, places: &[(f64, f64)], label: &str) {
        self.write(out, places, (label, "currentColor"));
    }

    /// Writes the label beside a dot: to the right, to the left, above, below or at a corner. Returns whether there is a place for it.
    pub fn beside(&mut self, out: &mut String, (x, y): (f64, f64), radius: f64, label: &str, colour: &str) -> bool {
        let (width, distance, corner) = (self.width(label), radius + GAP, radius + 1.0);
        let middle = y + 0.35 * self.font;
        let places = [
            (x + distance, middle),
            (x - distance - width, middle),
            (x - width / 2.0, y - distance),
            (x - width / 2.0, y + distance + 0.8 * self.font),
            (x + corner, y - corner),
            (x + corner, y + corner + 0.8 * self.font),
            (x - corner - width, y - corner),
            (x - corner - width, y + corner + 0.8 * self.font),
        ];
        self.write(out, &places, (label, colour))
    }

    fn write(&mut self, out: &mut String, places: &[(f64, f64)], (label, colour): (&str, &str)) -> bool {
        let (width, font) = (self.width(label), self.font);
        let extent = |&(x, y): &(f64, f64)| {
            let height = CHARACTER.1 * font;
            Extent { left: x, top: y - 0.8 * height, right: x + width, bottom: y + 0.2 * height }
        };
        let fits = |extent: &Extent| {
            extent.left >= 0.0
                && extent.right <= self.area.0
                && extent.top >= 0.0
                && extent.bottom <= self.area.1
                && !self.taken.iter().any(|taken| taken.overlaps(extent))
        };
        let Some((place, extent)) = places.iter().map(|place| (place, extent(place))).find(|(_, extent)| fits(extent))
        else {
            return false;
        };
        self.taken.push(extent);
        let label = label.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let (x, y) = place;
        let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{font}\" fill=\"{colour}\">{label}</text>");
        true
    }

    /// Width of a label in pixels.
    pub fn width(&self, label: &str) -> f64 {
        CHARACTER.0 * self.font * label.chars().count() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::values;
    use super::*;

    /// Places of the labels in the SVG.
    fn places(out: &str) -> Vec<(f64, f64)> {
        values(out, "x").into_iter().zip(values(out, "y")).collect()
    }

    #[test]
    fn labels_avoid_dots_each_other_and_the_edge() {
        let (mut labels, mut out) = (Labels::new((100.0, 100.0), 10.0), String::new());
        labels.block(Extent::around(50.0, 50.0, 5.0));
        labels.block(Extent::around(70.0, 50.0, 8.0));
        // Another dot is at the right of the first.
        labels.beside(&mut out, (50.0, 50.0), 5.0, "abc", "red");
        let width = labels.width("abc");
        assert!((places(&out)[0].0 - (50.0 - 8.0 - width)).abs() < 0.06, "{out}");
        // The edge is at the right of the second.
        labels.beside(&mut out, (70.0, 50.0), 8.0, "a longer name", "red");
        assert_eq!(places(&out).len(), 1, "no place is free: {out}");
        labels.beside(&mut out, (70.0, 50.0), 8.0, "ab", "red");
        assert!(places(&out)[1].0 > 78.0, "{out}");
        labels.place(&mut out, &[(81.0, 53.0), (10.0, 90.0)], "a & b");
        assert_eq!(places(&out)[2], (10.0, 90.0), "the first place is taken: {out}");
        assert!(out.contains(">a &amp; b</text>"), "{out}");
    }

    #[test]
    fn a_label_whose_sides_are_taken_is_at_a_corner() {
        let (mut labels, mut out) = (Labels::new((100.0, 100.0), 10.0), String::new());
        labels.block(Extent::around(50.0, 50.0, 5.0));
        for (left, top, right, bottom) in
            [(58.0, 47.0, 90.0, 53.0), (10.0, 47.0, 42.0, 53.0), (47.0, 30.0, 53.0, 42.0), (47.0, 58.0, 53.0, 75.0)]
        {
            labels.block(Extent::between((left, top), (right, bottom)));
        }
        assert!(labels.beside(&mut out, (50.0, 50.0), 5.0, "ab", "red"));
        assert_eq!(places(&out), [(56.0, 44.0)]);
        labels.block(Extent::between((0.0, 0.0), (100.0, 100.0)));
        assert!(!labels.beside(&mut out, (50.0, 50.0), 5.0, "ab", "red"));
    }
}
