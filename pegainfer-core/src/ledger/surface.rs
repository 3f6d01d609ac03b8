//! Piecewise linear interpolation of measured times.

/// Times as a function of one variable, in ascending order.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Curve {
    points: Vec<(f64, f64)>,
}

impl Curve {
    /// Adds a point; averages it with an existing point at the same place.
    pub fn add(&mut self, x: f64, y: f64) {
        match self.points.binary_search_by(|point| point.0.total_cmp(&x)) {
            Ok(i) => self.points[i].1 = f64::midpoint(self.points[i].1, y),
            Err(i) => self.points.insert(i, (x, y)),
        }
    }

    /// Value at `x`, interpolated between its neighbours or extrapolated from the two outermost points. Extrapolation
    /// never has a negative slope, because more work takes no less time. `None` without points.
    pub fn at(&self, x: f64) -> Option<f64> {
        let first = self.points.first()?;
        if self.points.len() == 1 {
            return Some(first.1);
        }
        let i = self.points.partition_point(|point| point.0 < x).clamp(1, self.points.len() - 1);
        Some(on_line(self.points[i - 1], self.points[i], x))
    }

    /// Smallest and largest `x`.
    pub fn range(&self) -> Option<(f64, f64)> {
        Some((self.points.first()?.0, self.points.last()?.0))
    }
}

/// Value at `x` on the line through two points, of which `a` has the smaller `x`; no negative slope beyond them.
fn on_line(a: (f64, f64), b: (f64, f64), x: f64) -> f64 {
    let slope = (b.1 - a.1) / (b.0 - a.0);
    let outside = x < a.0 || x > b.0;
    let slope = if outside { slope.max(0.0) } else { slope };
    let (from, value) = if x > b.0 { b } else { a };
    value + slope * (x - from)
}

/// Curves over a second variable, in ascending order.
#[derive(Debug, Clone, Default)]
pub(super) struct Surface {
    curves: Vec<(f64, Curve)>,
    /// Largest `x` of all points, at least 0.
    greatest: f64,
    /// True if the second variable has classes, such as the sizes of CUDA graphs: a value costs as much as the next
    /// larger class.
    classes: bool,
}

impl Surface {
    /// An empty surface; `classes` as above.
    pub fn new(classes: bool) -> Self {
        Self { curves: Vec::new(), greatest: 0.0, classes }
    }

    /// Adds a point.
    pub fn add(&mut self, class: f64, x: f64, y: f64) {
        self.greatest = self.greatest.max(x);
        match self.curves.binary_search_by(|(other, _)| other.total_cmp(&class)) {
            Ok(i) => self.curves[i].1.add(x, y),
            Err(i) => {
                let mut curve = Curve::default();
                curve.add(x, y);
                self.curves.insert(i, (class, curve));
            }
        }
    }

    /// The value at (`class`, `x`); beyond the outermost curves, on the line through them. `None` without points.
    pub fn at(&self, class: f64, x: f64) -> Option<f64> {
        let i = self.curves.partition_point(|(other, _)| *other < class);
        if self.classes
            && let Some((_, curve)) = self.curves.get(i)
        {
            return curve.at(x);
        }
        self.across(class, |curve| curve.at(x))
    }

    /// Variant of [`at`](Self::at) without extrapolation: uses the nearest curve and point.
    pub fn within(&self, class: f64, x: f64) -> Option<f64> {
        let ((least, _), (most, _)) = (self.curves.first()?, self.curves.last()?);
        let nearest = |curve: &Curve| curve.range().and_then(|(least, most)| curve.at(x.clamp(least, most)));
        self.across(class.clamp(*least, *most), nearest)
    }

    /// Value at `class` on the line through the two nearest curves, each with one `value`.
    fn across(&self, class: f64, value: impl Fn(&Curve) -> Option<f64>) -> Option<f64> {
        if let [(_, curve)] = &self.curves[..] {
            return value(curve);
        }
        let i = self.curves.partition_point(|(other, _)| *other < class).clamp(1, self.curves.len().max(2) - 1);
        let ((a, below), (b, above)) = (self.curves.get(i - 1)?, self.curves.get(i)?);
        Some(on_line((*a, value(below)?), (*b, value(above)?), class))
    }

    /// True if (`class`, `x`) is within the measured range: no more than the largest class and the longest curve.
    pub fn covers(&self, class: f64, x: f64) -> bool {
        self.curves.last().is_some_and(|(last, _)| class <= *last) && x <= self.greatest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_is_linear_between_its_points_and_never_falls_beyond_them() {
        let mut curve = Curve::default();
        assert_eq!(curve.at(1.0), None);
        curve.add(10.0, 5.0);
        assert_eq!(curve.at(99.0), Some(5.0));
        curve.add(30.0, 25.0);
        curve.add(20.0, 7.0);
        assert_eq!((curve.at(15.0), curve.at(25.0), curve.at(20.0)), (Some(6.0), Some(16.0), Some(7.0)));
        assert_eq!((curve.at(40.0), curve.at(5.0)), (Some(43.0), Some(4.0)));
        let mut falling = Curve::default();
        falling.add(1.0, 9.0);
        falling.add(2.0, 5.0);
        assert_eq!((falling.at(1.5), falling.at(3.0), falling.at(0.0)), (Some(7.0), Some(5.0), Some(9.0)));
    }

    #[test]
    fn a_surface_goes_between_its_curves_or_up_to_the_next_class() {
        let surface = |classes| {
            let mut surface = Surface::new(classes);
            for (class, x, y) in [(1.0, 0.0, 10.0), (1.0, 10.0, 20.0), (5.0, 0.0, 50.0), (5.0, 10.0, 70.0)] {
                surface.add(class, x, y);
            }
            surface
        };
        assert_eq!(surface(false).at(3.0, 5.0), Some(37.5));
        assert_eq!(surface(true).at(3.0, 5.0), Some(60.0));
        // Beyond the largest class both are extrapolated.
        assert_eq!((surface(false).at(9.0, 0.0), surface(true).at(9.0, 0.0)), (Some(90.0), Some(90.0)));
        assert!(surface(true).covers(5.0, 10.0) && !surface(true).covers(6.0, 1.0) && !surface(true).covers(1.0, 11.0));
        assert_eq!(surface(false).at(1.0, 5.0), Some(15.0));
        assert_eq!((surface(false).within(3.0, 5.0), surface(false).within(9.0, -7.0)), (Some(37.5), Some(50.0)));
    }
}
