//! Dots on two logarithmic axes, below limits: a roofline plot.

use super::labels::{Extent, Labels};
use super::{BELOW, COLOURS, Draw, LEGEND_LINE, PLOT, text};
use std::fmt::Write;

/// Radius in pixels of a dot whose area is 1, and the least radius.
const RADIUS: (f64, f64) = (15.0, 2.5);
/// Segments of the slope of the limit, each of which labels avoid.
const SLOPE_SEGMENTS: i32 = 50;
/// Font size of labels in the plot.
const FONT: f64 = 10.0;

/// A dot.
#[derive(Debug, Clone)]
pub struct Dot {
    /// Short text beside it.
    pub label: String,
    /// Place; a dot that is not at finite, positive numbers is left out.
    pub at: (f64, f64),
    /// Its area, from 0 to 1.
    pub area: f64,
}

/// Dots of one thing under several conditions, joined by a thin line.
#[derive(Debug, Clone)]
pub struct Track {
    /// Name in the legend, and beside the largest dot that has a place for it.
    pub name: String,
    /// Dots in the order of the line.
    pub dots: Vec<Dot>,
}

/// One plot with tracks below a limit `y <= min(top, slope x)`.
#[derive(Debug, Clone)]
pub struct Dots {
    /// Name and unit of the y axis.
    pub title: String,
    /// Name of the x axis.
    pub x_label: String,
    /// The largest y, and the name of that limit.
    pub top: (f64, String),
    /// The largest y / x, and the name of that limit.
    pub slope: (f64, String),
    /// Tracks, each of another colour.
    pub tracks: Vec<Track>,
}

/// Factor between the least value and the lower end of an axis, and between its upper end and the largest value.
const MARGINS: (f64, f64) = (1.6, 2.0);

/// A logarithmic axis.
struct Decades {
    /// Logarithms of its ends.
    ends: (f64, f64),
    pixels: f64,
}

impl Decades {
    fn of(values: impl Iterator<Item = f64>, pixels: f64) -> Self {
        let (least, most) = values.fold((f64::INFINITY, 0.0_f64), |(least, most), v| (least.min(v), most.max(v)));
        Self { ends: ((least / MARGINS.0).log10(), (most * MARGINS.1).log10()), pixels }
    }

    fn place(&self, value: f64) -> f64 {
        self.pixels * (value.log10() - self.ends.0) / (self.ends.1 - self.ends.0)
    }

    /// The powers of ten.
    fn ticks(&self) -> impl Iterator<Item = (f64, String)> + '_ {
        (self.ends.0.ceil() as i32..=self.ends.1.floor() as i32).map(|power| {
            let value = 10_f64.powi(power);
            let digits = usize::try_from(-power).unwrap_or(0);
            (self.place(value), format!("{value:.digits$}"))
        })
    }
}

impl Draw for Dots {
    fn legend_lines(&self) -> usize {
        self.tracks.len()
    }

    fn draw(&self, out: &mut String) {
        let is_shown = |dot: &&Dot| [dot.at.0, dot.at.1].iter().all(|v| v.is_finite() && *v > 0.0);
        let shown: Vec<Vec<&Dot>> =
            self.tracks.iter().map(|track| track.dots.iter().filter(is_shown).collect()).collect();
        let ((top, _), (slope, _)) = (&self.top, &self.slope);
        let dots = || shown.iter().flatten().map(|dot| dot.at);
        let xs = Decades::of(dots().map(|at| at.0).chain([top / slope]), PLOT.0);
        let ys = Decades::of(dots().map(|at| at.1).chain([*top]), PLOT.1);
        let place = |(x, y): (f64, f64)| (xs.place(x), PLOT.1 - ys.place(y));
        axes(out, &xs, &ys, (&self.title, &self.x_label));
        let mut labels = Labels::new(PLOT, FONT);
        for (dot, (x, y)) in shown.iter().flatten().map(|dot| (dot, place(dot.at))) {
            labels.block(Extent::around(x, y, radius(dot.area)));
        }
        self.draw_limit(out, &xs, &ys, &mut labels);
        let coloured = || shown.iter().zip(COLOURS.iter().cycle());
        for (dots, colour) in coloured() {
            let placed: Vec<(f64, f64)> = dots.iter().map(|dot| place(dot.at)).collect();
            let line: Vec<String> = placed.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
            let style = format!("fill=\"none\" stroke=\"{colour}\" stroke-opacity=\"0.5\"");
            let _ = writeln!(out, "<polyline points=\"{}\" {style}/>", line.join(" "));
            for (dot, (x, y)) in dots.iter().zip(placed) {
                let r = radius(dot.area);
                let style = format!("fill=\"{colour}\" fill-opacity=\"0.6\" stroke=\"{colour}\"");
                let _ = writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{r:.1}\" {style}/>");
            }
        }
        // Names come first: they find a place more often than the labels of dots.
        for ((dots, colour), track) in coloured().zip(&self.tracks) {
            let mut largest_first = dots.clone();
            largest_first.sort_by(|a, b| b.area.total_cmp(&a.area));
            let mut name = |dot: &&Dot| labels.beside(out, place(dot.at), radius(dot.area), &track.name, colour);
            largest_first.iter().any(&mut name);
        }
        for (dots, colour) in coloured() {
            for dot in dots {
                labels.beside(out, place(dot.at), radius(dot.area), &dot.label, colour);
            }
        }
        for (i, (track, colour)) in self.tracks.iter().zip(COLOURS.iter().cycle()).enumerate() {
            let y = PLOT.1 + BELOW + LEGEND_LINE * i as f64;
            let _ = writeln!(out, "<circle cx=\"12\" cy=\"{y:.1}\" r=\"5\" fill=\"{colour}\"/>");
            text(out, 32.0, y + 4.0, "start", &track.name);
        }
    }
}

impl Dots {
    /// Draws the limit as a dashed line with the names of its parts.
    fn draw_limit(&self, out: &mut String, xs: &Decades, ys: &Decades, labels: &mut Labels) {
        let ((top, top_name), (slope, slope_name)) = (&self.top, &self.slope);
        let (corner, roof) = (xs.place(top / slope), PLOT.1 - ys.place(*top));
        // Where the slope enters the plot area: at its left, or at its bottom.
        let begin = (10_f64.powf(ys.ends.0) / slope).max(10_f64.powf(xs.ends.0));
        let (x, y) = (xs.place(begin), PLOT.1 - ys.place(begin * slope));
        let _ = writeln!(
            out,
            "<polyline points=\"{x:.1},{y:.1} {corner:.1},{roof:.1} {:.1},{roof:.1}\" fill=\"none\" stroke=\"currentColor\" \
             stroke-width=\"2\" stroke-dasharray=\"5 4\"/>",
            PLOT.0
        );
        let along = |part: f64| (x + (corner - x) * part, y + (roof - y) * part);
        for i in 0..=SLOPE_SEGMENTS {
            let (x, y) = along(f64::from(i) / f64::from(SLOPE_SEGMENTS));
            labels.block(Extent::around(x, y, 2.0));
        }
        labels.block(Extent::between((corner, roof - 2.0), (PLOT.0, roof + 2.0)));
        let above = roof - 0.5 * FONT;
        let longest = PLOT.0 - labels.width(top_name);
        let places = [0.0, 1.0, 0.5, 0.25, 0.75].map(|part| corner + FONT + (longest - corner - FONT) * part);
        labels.place(out, &places.map(|x| (x, above)), top_name);
        let width = labels.width(slope_name);
        let left = |part: f64| (along(part).0 - width - 0.6 * FONT, along(part).1 - 0.4 * FONT);
        labels.place(out, &[left(0.6), left(0.7), left(0.5), left(0.8), left(0.4)], slope_name);
    }
}

/// Radius of a dot of this area.
fn radius(area: f64) -> f64 {
    (RADIUS.0 * area.clamp(0.0, 1.0).sqrt()).max(RADIUS.1)
}

/// Draws the grid with its numbers, and the names of the axes.
fn axes(out: &mut String, xs: &Decades, ys: &Decades, (title, x_label): (&str, &str)) {
    text(out, 0.0, -10.0, "start", title);
    for (y, label) in ys.ticks() {
        let y = PLOT.1 - y;
        let _ = writeln!(out, "<path d=\"M0 {y:.1}H{}\" stroke=\"currentColor\" stroke-opacity=\"0.3\"/>", PLOT.0);
        text(out, -8.0, y + 4.0, "end", &label);
    }
    for (x, label) in xs.ticks() {
        let _ =
            writeln!(out, "<path d=\"M{x:.1} 0V{}\" stroke=\"currentColor\" stroke-opacity=\"0.3\"/>", PLOT.1 + 5.0);
        text(out, x, PLOT.1 + 19.0, "middle", &label);
    }
    text(out, PLOT.0 / 2.0, PLOT.1 + 38.0, "middle", x_label);
}

#[cfg(test)]
mod tests {
    use super::super::tests::{values, well_formed};
    use super::super::{Ink, render};
    use super::*;

    fn plot(dots: Vec<Dot>) -> Dots {
        let (top, slope) = ((1000.0, "peak".into()), (10.0, "bandwidth".into()));
        let tracks = vec![Track { name: "linear".into(), dots }];
        Dots { title: "TFLOP/s".into(), x_label: "FLOPs per byte".into(), top, slope, tracks }
    }

    fn dot(at: (f64, f64), area: f64) -> Dot {
        Dot { label: "32".into(), at, area }
    }

    #[test]
    fn dots_are_where_their_values_say_and_as_large_as_their_shares() {
        let dots = vec![dot((1.0, 10.0), 1.0), dot((10.0, 1.0), 0.25), dot((0.0, 5.0), 1.0), dot((5.0, f64::NAN), 1.0)];
        let svg = render("", "", &[plot(dots)], Ink::Grey);
        well_formed(&svg);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        // x from 1 to 100, y from 1 to 1,000, and margins; the last circle is the legend's.
        let (xs, ys, rs) = (values(&svg, "cx"), values(&svg, "cy"), values(&svg, "r"));
        assert_eq!((xs.len(), &rs[..2]), (3, &[RADIUS.0, RADIUS.0 / 2.0][..]));
        let place = |value: f64, most: f64, pixels: f64| {
            let (least, most) = (1.0 / MARGINS.0, most * MARGINS.1);
            pixels * (value / least).ln() / (most / least).ln()
        };
        let (x, y) = (|v| place(v, 100.0, PLOT.0), |v| PLOT.1 - place(v, 1000.0, PLOT.1));
        let near = |a: f64, b: f64| (a - b).abs() < 0.06;
        assert!(near(xs[0], x(1.0)) && near(xs[1], x(10.0)) && near(ys[0], y(10.0)) && near(ys[1], y(1.0)), "{svg}");
        // The limit begins at the left end and ends at the right one, with its corner at (100, 1,000).
        let begin = 1.0 / MARGINS.0;
        let (corner, roof) = (x(100.0), y(1000.0));
        let limit = format!("points=\"0.0,{:.1} {corner:.1},{roof:.1} {:.1},{roof:.1}\"", y(10.0 * begin), PLOT.0);
        assert!(svg.contains(&limit), "{limit}: {svg}");
    }

    #[test]
    fn a_plot_without_dots_has_its_limit() {
        let svg = render("", "", &[plot(Vec::new())], Ink::Grey);
        well_formed(&svg);
        assert!(svg.contains(">bandwidth</text>") && svg.contains(">100</text>") && !svg.contains("NaN"), "{svg}");
    }

    #[test]
    fn labels_of_dots_at_the_same_place_are_left_out() {
        let at = |n: usize| vec![dot((5.0, 5.0), 0.1); n];
        let labels = |n: usize| render("", "", &[plot(at(n))], Ink::Grey).matches(">32</text>").count();
        assert_eq!(labels(1), 1);
        assert!((1..5).contains(&labels(40)), "{}", labels(40));
    }
}
