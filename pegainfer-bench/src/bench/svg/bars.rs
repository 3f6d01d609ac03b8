//! Stacked bars.

use super::{BELOW, COLOURS, Draw, LEGEND_LINE, PLOT, text, y_axis};
use std::fmt::Write;

/// Part of a bar's place that it fills.
const WIDTH: f64 = 0.6;

/// Bars of the same parts, stacked in order from the axis up.
#[derive(Debug, Clone)]
pub struct Bars {
    /// Name and unit of the y axis.
    pub title: String,
    /// Name of the x axis.
    pub x_label: String,
    /// Names of the parts in the legend.
    pub parts: Vec<String>,
    /// The label of each bar, and its parts in the order of their names; those that are not finite are left out.
    pub bars: Vec<(String, Vec<f64>)>,
}

impl Draw for Bars {
    fn legend_lines(&self) -> usize {
        self.parts.len()
    }

    fn draw(&self, out: &mut String) {
        let finite = |parts: &[f64]| parts.iter().map(|part| if part.is_finite() { *part } else { 0.0 }).collect();
        let bars: Vec<Vec<f64>> = self.bars.iter().map(|(_, parts)| finite(parts)).collect();
        let most = bars.iter().map(|parts| parts.iter().sum()).fold(0.0, f64::max);
        let y_place = y_axis(out, &self.title, most);
        text(out, PLOT.0 / 2.0, PLOT.1 + 38.0, "middle", &self.x_label);
        let place = PLOT.0 / bars.len().max(1) as f64;
        for (i, ((label, _), parts)) in self.bars.iter().zip(&bars).enumerate() {
            let x = place * (i as f64 + (1.0 - WIDTH) / 2.0);
            text(out, place * (i as f64 + 0.5), PLOT.1 + 19.0, "middle", label);
            let mut sum = 0.0;
            for (part, colour) in parts.iter().zip(COLOURS.iter().cycle()) {
                let (below, above) = (y_place(sum), y_place(sum + part));
                sum += part;
                let (width, height) = (place * WIDTH, below - above);
                let _ = writeln!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{above:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
                );
            }
        }
        for (i, (name, colour)) in self.parts.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let y = PLOT.1 + BELOW + LEGEND_LINE * i as f64;
            let _ = writeln!(out, "<rect x=\"0\" y=\"{:.1}\" width=\"24\" height=\"8\" fill=\"{colour}\"/>", y - 4.0);
            text(out, 32.0, y + 4.0, "start", name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{values, well_formed};
    use super::super::{Ink, render};
    use super::*;

    #[test]
    fn parts_are_stacked_to_scale() {
        let bars = vec![("1".into(), vec![1.0, 3.0]), ("a & b".into(), vec![5.0, f64::NAN])];
        let parts = vec!["linear".into(), "attention".into()];
        let bars = Bars { title: "ms".into(), x_label: "<".into(), parts, bars };
        let svg = render("", "", &[bars], Ink::Grey);
        well_formed(&svg);
        let (ys, heights) = (values(&svg, "y"), values(&svg, "height"));
        // The first height is the document's, the last two are the legend's.
        let pixels = |ms: f64| PLOT.1 * ms / 5.0;
        assert_eq!(heights[1..5], [pixels(1.0), pixels(3.0), pixels(5.0), 0.0]);
        let tops: Vec<f64> =
            svg.lines().filter(|line| line.starts_with("<rect")).map(|line| values(line, "y")[0]).collect();
        assert_eq!(tops[..4], [PLOT.1 - pixels(1.0), PLOT.1 - pixels(4.0), 0.0, 0.0]);
        assert!(ys.iter().all(|y| y.is_finite()) && !svg.contains("NaN"));
    }
}
