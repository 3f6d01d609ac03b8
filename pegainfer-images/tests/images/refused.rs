//! Files that are refused, in little time and memory.

use crate::counting::peak_bytes;
use crate::{expected, fixture, keys, names};
use pegainfer_images::{ImageError, ImageLimits, ImageProcessor, Resolution, decode, probe};
use std::time::{Duration, Instant};

/// Time to refuse a file.
const MAX_TIME: Duration = Duration::from_millis(50);
/// Memory to refuse a file in bytes. Half of a JPEG or PNG file is decoded first.
const MAX_MEMORY: usize = 1 << 20;

fn process(bytes: &[u8]) -> Result<(), String> {
    let (limits, resolution) = (ImageLimits::default(), Resolution::default());
    ImageProcessor::default().process(bytes, &limits, &resolution).map(drop).map_err(|error| error.to_string())
}

#[test]
fn hostile_files_are_refused_in_little_time_and_memory() {
    let expected = expected("refused");
    assert_eq!(names("refused"), keys(&expected));
    for name in names("refused") {
        let bytes = fixture(&format!("refused/{name}"));
        let started = Instant::now();
        let (result, peak) = peak_bytes(|| process(&bytes));
        let (message, took) = (result.expect_err(&name), started.elapsed());
        assert!(message.contains(expected[&name].as_str().unwrap()), "{name}: {message}");
        assert!(message.contains("; ") && !message.contains('\n'), "{name}: {message}");
        assert!(took < MAX_TIME, "{name}: {took:?}");
        assert!(peak < MAX_MEMORY, "{name}: {peak} bytes");
    }
}

#[test]
fn a_large_colour_profile_is_not_inflated() {
    let bytes = fixture("odd/icc_bomb_200MiB.png");
    let started = Instant::now();
    let (image, peak) = peak_bytes(|| decode(&bytes, &ImageLimits::default()).unwrap());
    assert!(started.elapsed() < MAX_TIME && peak < MAX_MEMORY + image.pixels.len(), "{peak} bytes");
}

#[test]
fn limits_are_those_given() {
    let bytes = fixture("sources/small.png");
    let probe = |limits: ImageLimits| probe(&bytes, &limits).map(|header| header.pixels());
    let default = ImageLimits::default();
    assert_eq!(probe(ImageLimits { max_pixels: 96 * 64, max_side: 96, ..default }).unwrap(), 6_144);
    let pixels = probe(ImageLimits { max_pixels: 96 * 64 - 1, ..default });
    assert!(matches!(pixels, Err(ImageError::TooManyPixels { width: 96, height: 64, max: 6_143 })));
    assert!(matches!(probe(ImageLimits { max_side: 95, ..default }), Err(ImageError::SideTooLong { max: 95, .. })));
    assert!(matches!(probe(ImageLimits { max_bytes: 5_104, ..default }), Err(ImageError::TooManyBytes { max: 5_104 })));
}

#[test]
fn a_gif_frame_beyond_the_memory_limit_is_refused() {
    // A screen of 1 x 1 pixels, and a frame of 65,535 x 65,535.
    let bytes = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\xff\xff\xff\xff\0\x02\x02D\x01\0;";
    let (result, peak) = peak_bytes(|| decode(bytes, &ImageLimits::default()).map(drop));
    assert!(matches!(result, Err(ImageError::TooMuchMemory(_))), "{result:?}");
    assert!(peak < MAX_MEMORY, "{peak} bytes");
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    for name in ["jpeg_named.png", "progressive.jpg", "still.gif", "lossy.webp", "alpha_lossless.webp", "bilevel.png"] {
        let bytes = fixture(&format!("odd/{name}"));
        // The end marker of PNG has 12 bytes; GIF and WebP have fewer after their pixels.
        for end in (0..bytes.len() - 16).step_by(7) {
            assert!(process(&bytes[..end]).is_err(), "{name}: {end} of {} bytes", bytes.len());
        }
    }
}
