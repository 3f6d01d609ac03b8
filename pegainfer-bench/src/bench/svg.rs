//! Plots as SVG: panels of lines, [`bars`], [`dots`] or a [`heat_map`] side by side, without a library.

pub mod bars;
pub mod dots;
pub mod heat_map;
mod labels;

use std::fmt::Write;

/// Width and height of a panel's plot area in pixels; the constants below are the margins for labels.
const PLOT: (f64, f64) = (400.0, 240.0);
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const TOP: f64 = 50.0;
const BELOW: f64 = 64.0;
const LEGEND_LINE: f64 = 18.0;
const COLOURS: [&str; 8] = ["#2f81f7", "#e07b20", "#2da44e", "#b063d9", "#d64550", "#1a9ba1", "#c9a227", "#8c8c8c"];
/// An axis whose ends differ by more than this factor is logarithmic.
const LOGARITHMIC: f64 = 9.0;

/// Colour of text, axes and grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ink {
    /// Readable on white and on black.
    Grey,
    /// For a white background.
    Dark,
    /// For a black background.
    Light,
}

impl Ink {
    fn colour(self) -> &'static str {
        match self {
            Self::Grey => "#808890",
            Self::Dark => "#1f2328",
            Self::Light => "#f0f6fc",
        }
    }
}

/// How the points of a series are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// By a line.
    Line,
    /// By a dashed line, which marks a limit.
    Dashed,
    /// Not at all.
    Points,
}

/// One line of a plot.
#[derive(Debug, Clone)]
pub struct Series {
    /// Name in the legend.
    pub name: String,
    /// How its points are joined.
    pub mark: Mark,
    /// Points (x, y); those that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

/// One plot, whose y axis begins at 0.
#[derive(Debug, Clone)]
pub struct Panel {
    /// Name and unit of the y axis.
    pub title: String,
    /// Name of the x axis.
    pub x_label: String,
    /// Lines, drawn in order.
    pub series: Vec<Series>,
}

/// What a panel shows.
pub trait Draw {
    /// Lines of its legend.
    fn legend_lines(&self) -> usize;

    /// Width of its plot area in pixels.
    fn width(&self) -> f64 {
        PLOT.0
    }

    /// Draws plot area, axes and legend; the origin is the upper left corner of the plot area.
    fn draw(&self, out: &mut String);
}

/// Renders the plots side by side, with `title` above and `note` below.
pub fn render(title: &str, note: &str, panels: &[impl Draw], ink: Ink) -> String {
    let most = panels.iter().map(Draw::legend_lines).max().unwrap_or(0);
    let width: f64 = panels.iter().map(|panel| LEFT + panel.width() + RIGHT).sum();
    let height = TOP + PLOT.1 + BELOW + LEGEND_LINE * (most + 1) as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
         height=\"{height}\" font-family=\"system-ui, sans-serif\" font-size=\"12\" color=\"{0}\" fill=\"{0}\">\n",
        ink.colour()
    );
    text(&mut out, LEFT, 18.0, "start", title);
    let mut left = 0.0;
    for panel in panels {
        let _ = writeln!(out, "<g transform=\"translate({} {TOP})\">", left + LEFT);
        panel.draw(&mut out);
        out += "</g>\n";
        left += LEFT + panel.width() + RIGHT;
    }
    text(&mut out, LEFT, height - 6.0, "start", note);
    out + "</svg>\n"
}

/// Maps x values to pixels of the plot area.
struct XAxis {
    least: f64,
    most: f64,
    logarithmic: bool,
}

impl XAxis {
    fn of(points: &[(f64, f64)]) -> Self {
        let least = points.iter().map(|p| p.0).fold(f64::INFINITY, f64::min);
        let most = points.iter().map(|p| p.0).fold(f64::NEG_INFINITY, f64::max);
        Self { least, most, logarithmic: least > 0.0 && most / least > LOGARITHMIC }
    }

    fn place(&self, x: f64) -> f64 {
        let scale = |x: f64| if self.logarithmic { x.ln() } else { x };
        let (least, most) = (scale(self.least), scale(self.most));
        // A single value is placed in the middle.
        if most > least { PLOT.0 * (scale(x) - least) / (most - least) } else { PLOT.0 / 2.0 }
    }
}

impl Draw for Panel {
    fn legend_lines(&self) -> usize {
        self.series.len()
    }

    fn draw(&self, out: &mut String) {
        let finite = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
            points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite()).collect()
        };
        let series: Vec<Vec<(f64, f64)>> = self.series.iter().map(|s| finite(&s.points)).collect();
        let all = series.concat();
        let axis = XAxis::of(&all);
        let y_place = y_axis(out, &self.title, all.iter().map(|p| p.1).fold(0.0, f64::max));
        x_ticks(out, &all, &axis);
        text(out, PLOT.0 / 2.0, PLOT.1 + 38.0, "middle", &self.x_label);
        for (i, (series, points)) in self.series.iter().zip(&series).enumerate() {
            let colour = COLOURS[i % COLOURS.len()];
            let style = if series.mark == Mark::Dashed { " stroke-dasharray=\"5 4\"" } else { "" };
            let placed: Vec<(f64, f64)> = points.iter().map(|&(x, y)| (axis.place(x), y_place(y))).collect();
            let y = PLOT.1 + BELOW + LEGEND_LINE * i as f64;
            if series.mark == Mark::Points {
                let _ = writeln!(out, "<rect x=\"9\" y=\"{}\" width=\"6\" height=\"6\" fill=\"{colour}\"/>", y - 3.0);
            } else {
                let line: Vec<String> = placed.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
                let stroke = format!("stroke=\"{colour}\" stroke-width=\"2\"{style}");
                let _ = writeln!(out, "<polyline points=\"{}\" fill=\"none\" {stroke}/>", line.join(" "));
                let _ = writeln!(out, "<path d=\"M0 {y}h24\" {stroke}/>");
            }
            for (x, y) in placed {
                let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
            }
            text(out, 32.0, y + 4.0, "start", &series.name);
        }
    }
}

/// Draws title and grid of a y axis from 0 to at least `most`, and returns the place of a value on it.
fn y_axis(out: &mut String, title: &str, most: f64) -> impl Fn(f64) -> f64 + use<> {
    let ticks = y_ticks(most);
    let most = ticks.last().copied().unwrap_or(1.0);
    let place = move |y: f64| PLOT.1 * (1.0 - y / most);
    text(out, 0.0, -10.0, "start", title);
    for tick in &ticks {
        let y = place(*tick);
        let _ = writeln!(out, "<path d=\"M0 {y:.1}H{}\" stroke=\"currentColor\" stroke-opacity=\"0.3\"/>", PLOT.0);
        text(out, -8.0, y + 4.0, "end", &short(*tick));
    }
    place
}

/// Labels the measured x values, except those whose label would overlap the previous one.
fn x_ticks(out: &mut String, points: &[(f64, f64)], axis: &XAxis) {
    let mut values: Vec<f64> = points.iter().map(|p| p.0).collect();
    values.sort_unstable_by(f64::total_cmp);
    let mut free = f64::NEG_INFINITY;
    for value in values {
        let (x, label) = (axis.place(value), short(value));
        let half = 4.0 * (label.len() + 1) as f64;
        if x - half < free {
            continue;
        }
        free = x + half;
        let _ = writeln!(out, "<path d=\"M{x:.1} {}v5\" stroke=\"currentColor\"/>", PLOT.1);
        text(out, x, PLOT.1 + 19.0, "middle", &label);
    }
}

/// Four to nine tick values from 0 to at least `most`, multiples of 1, 2 or 5 times a power of ten.
fn y_ticks(most: f64) -> Vec<f64> {
    let most = if most > 0.0 { most } else { 1.0 };
    let power = 10f64.powf((most / 4.0).log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    let step = steps.into_iter().rfind(|step| most / step >= 3.0).unwrap_or(power);
    (0..=(most / step).ceil() as usize).map(|i| i as f64 * step).collect()
}

/// A number with few digits, and a suffix k or M.
fn short(value: f64) -> String {
    let (value, unit) = match value.abs() {
        v if v >= 1e6 => (value / 1e6, "M"),
        v if v >= 1e4 => (value / 1e3, "k"),
        _ => (value, ""),
    };
    let digits = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 1.0 => 3,
        _ => 6,
    };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{unit}")
}

fn text(out: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(points: &[(f64, f64)]) -> Panel {
        let series = |name: &str, mark| Series { name: name.into(), mark, points: points.to_vec() };
        Panel {
            title: "TPOT, ms".into(),
            x_label: "a < b & c".into(),
            series: vec![series("p50", Mark::Line), series("floor", Mark::Dashed)],
        }
    }

    /// Every value of an attribute, in order.
    pub fn values(svg: &str, name: &str) -> Vec<f64> {
        svg.split(&format!(" {name}=\"")).skip(1).map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect()
    }

    /// Checks that elements open and close in pairs and that text contains no markup.
    pub fn well_formed(svg: &str) {
        let mut open = Vec::new();
        for part in svg.split('<').skip(1) {
            let (tag, rest) = part.split_once('>').expect("a tag ends");
            assert!(!rest.contains('>'), "{part}");
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            let name = tag.split([' ', '/']).find(|name| !name.is_empty()).unwrap();
            if tag.starts_with('/') {
                assert_eq!(open.pop(), Some(name), "{part}");
            } else if !tag.ends_with('/') {
                open.push(name);
            }
        }
        assert!(open.is_empty(), "{open:?}");
        assert!(svg.split('&').skip(1).all(|rest| ["amp;", "lt;", "gt;"].iter().any(|name| rest.starts_with(name))));
    }

    #[test]
    fn a_plot_is_well_formed_and_holds_every_point() {
        for points in [
            &[(1.0, 3.6), (8.0, 3.9), (32.0, 6.2), (128.0, 19.3)][..],
            &[(4.0, 0.02), (5.0, 0.07), (6.0, 0.1)],
            &[(1.0, 123_456.0)],
            &[(0.0, 0.0), (2.0, 0.0)],
            &[],
        ] {
            let svg = render("Qwen3 <tiny>", "a & b", &[panel(points), panel(points)], Ink::Grey);
            well_formed(&svg);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            let (xs, ys) = (values(&svg, "cx"), values(&svg, "cy"));
            assert_eq!((xs.len(), ys.len()), (4 * points.len(), 4 * points.len()));
            assert!(xs.iter().all(|&x| (0.0..=PLOT.0).contains(&x)), "{xs:?}");
            assert!(ys.iter().all(|&y| (0.0..=PLOT.1).contains(&y)), "{ys:?}");
        }
    }

    #[test]
    fn points_are_where_their_values_say() {
        let svg = render("", "", &[panel(&[(1.0, 5.0), (10.0, 10.0), (100.0, f64::NAN)])], Ink::Grey);
        assert_eq!(values(&svg, "cx"), [0.0, PLOT.0, 0.0, PLOT.0], "points that are not finite are left out");
        assert_eq!(values(&svg, "cy"), [PLOT.1 / 2.0, 0.0, PLOT.1 / 2.0, 0.0]);
        // Decades are as wide as each other.
        let svg = render("", "", &[panel(&[(1.0, 1.0), (10.0, 1.0), (100.0, 1.0)])], Ink::Grey);
        assert_eq!(values(&svg, "cx")[..3], [0.0, PLOT.0 / 2.0, PLOT.0]);
    }

    #[test]
    fn points_that_are_not_joined_have_no_line() {
        let mut panel = panel(&[(1.0, 5.0), (10.0, 10.0)]);
        panel.series.iter_mut().for_each(|series| series.mark = Mark::Points);
        let svg = render("", "", &[panel], Ink::Grey);
        well_formed(&svg);
        assert!(!svg.contains("polyline") && values(&svg, "cx").len() == 4);
    }

    #[test]
    fn ticks_are_round_and_cover_the_values() {
        for most in [0.0013, 0.9, 1.0, 3.7, 19.3, 99.0, 100.0, 5436.0] {
            let ticks = y_ticks(most);
            assert!((4..=9).contains(&ticks.len()) && ticks[ticks.len() - 1] >= most, "{most}: {ticks:?}");
        }
        assert_eq!([0.5, 20.0, 5000.0, 15000.0, 0.125].map(short), ["0.5", "20", "5000", "15k", "0.125"]);
    }
}
