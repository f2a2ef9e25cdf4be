//! A sound's file to samples: one channel, 16,000 a second.
//!
//! WAV, FLAC and MP3, told apart by their first bytes. Channels are averaged. Files are not trusted: a file is decoded
//! packet by packet, and no further than the longest sound that is read. Whoever cuts a sound into pieces (`split.rs`)
//! may read a longer one.

use std::io::Cursor;

use symphonia::core::codecs::CodecParameters;
use symphonia::core::codecs::audio::AudioDecoderOptions;
use symphonia::core::errors::Error;
use symphonia::core::formats::probe::Hint;
use symphonia::core::formats::{FormatOptions, TrackType};
use symphonia::core::io::MediaSourceStream;
use symphonia::core::meta::MetadataOptions;

use super::rate::at_rate;

/// Samples a second, as the model was trained.
pub const RATE: u32 = 16_000;
/// Seconds of a sound, at most: what the model was trained with.
pub const MOST_SECONDS: u32 = 30;
/// Seconds of a sound that is read in pieces, at most.
pub const MOST_SECONDS_IN_PIECES: u32 = 1800;
/// Samples of one channel of a file, at most: those of the longest sound at the usual rate.
const MOST_SAMPLES: u64 = MOST_SECONDS_IN_PIECES as u64 * 48_000;
/// Samples a second of a file.
const RATES: std::ops::RangeInclusive<u32> = 4_000..=192_000;
/// Channels of a file, at most.
const MOST_CHANNELS: usize = 8;

/// Why a file gives no sound.
#[derive(Debug, thiserror::Error)]
pub enum SoundError {
    #[error("it is not a sound in WAV, FLAC or MP3")]
    Unknown,
    #[error("it says that it has {said} bytes of samples, and {present} are there")]
    Cut { said: u64, present: u64 },
    #[error("it has {rate} samples a second: {} to {} are read", RATES.start(), RATES.end())]
    Rate { rate: u32 },
    #[error("it has {channels} channels, {MOST_CHANNELS} are the most that are read")]
    Channels { channels: usize },
    #[error("it lasts longer than {most} seconds, the most that are read")]
    TooLong { most: u64 },
    #[error("it has {samples} samples, too few for one soft token")]
    TooShort { samples: usize },
    #[error("it is damaged: {0}")]
    Damaged(String),
}

impl From<Error> for SoundError {
    fn from(error: Error) -> SoundError {
        SoundError::Damaged(error.to_string().split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

/// Decodes the file of a sound that is read in one piece.
pub fn decode_sound(bytes: &[u8]) -> Result<Vec<f32>, SoundError> {
    decode_sound_up_to(bytes, MOST_SECONDS)
}

/// Decodes the file of a sound that lasts so many seconds at most.
pub fn decode_sound_up_to(bytes: &[u8], most_seconds: u32) -> Result<Vec<f32>, SoundError> {
    match bytes {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => check_wav(bytes)?,
        [b'f', b'L', b'a', b'C', ..] | [b'I', b'D', b'3', ..] => {}
        // The frames of an MP3: eleven ones, a version and a layer that exist.
        [0xff, second, ..] if second & 0xe0 == 0xe0 && second & 0x18 != 0x08 && second & 0x06 == 0x02 => {}
        _ => return Err(SoundError::Unknown),
    }
    let source = MediaSourceStream::new(Box::new(Cursor::new(bytes.to_vec())), Default::default());
    let (formats, metadata) = (FormatOptions::default(), MetadataOptions::default());
    let mut format = symphonia::default::get_probe().probe(&Hint::new(), source, formats, metadata)?;
    let track = format.default_track(TrackType::Audio).ok_or(SoundError::Unknown)?;
    let Some(CodecParameters::Audio(parameters)) = &track.codec_params else { return Err(SoundError::Unknown) };
    let (track, options) = (track.id, AudioDecoderOptions::default());
    let mut decoder = symphonia::default::get_codecs().make_audio_decoder(parameters, &options)?;
    let (mut rate, mut mono, mut interleaved) = (None, Vec::new(), Vec::<f32>::new());
    while let Some(packet) = format.next_packet()? {
        if packet.track_id != track {
            continue;
        }
        let decoded = decoder.decode(&packet)?;
        let (found, channels) = (decoded.spec().rate(), decoded.spec().channels().count());
        if !RATES.contains(&found) || rate.is_some_and(|rate| rate != found) {
            return Err(SoundError::Rate { rate: found });
        }
        if !(1..=MOST_CHANNELS).contains(&channels) {
            return Err(SoundError::Channels { channels });
        }
        rate = Some(found);
        interleaved.resize(decoded.samples_interleaved(), 0.0);
        decoded.copy_to_slice_interleaved(&mut interleaved);
        let share = 1.0 / channels as f32;
        mono.extend(interleaved.chunks_exact(channels).map(|frame| frame.iter().sum::<f32>() * share));
        let most = u64::from(most_seconds) * u64::from(found);
        if mono.len() as u64 > most.min(MOST_SAMPLES) {
            return Err(SoundError::TooLong { most: most.min(MOST_SAMPLES) / u64::from(found) });
        }
    }
    if mono.iter().any(|sample| !sample.is_finite()) {
        return Err(SoundError::Damaged("a sample is not a number".into()));
    }
    match rate {
        Some(rate) => Ok(at_rate(&mono, rate, RATE)),
        None => Err(SoundError::TooShort { samples: 0 }),
    }
}

/// Whether the samples that a WAV speaks of are there: decoders stop without a word where a file does. Nor do they
/// expect more channels than anybody has: their sizes overflow.
fn check_wav(bytes: &[u8]) -> Result<(), SoundError> {
    let mut at = 12usize;
    while let Some([a, b, c, d, s0, s1, s2, s3]) = bytes.get(at..at + 8) {
        let said = u64::from(u32::from_le_bytes([*s0, *s1, *s2, *s3]));
        let present = (bytes.len() - at - 8) as u64;
        if let (b"fmt ", Some([low, high])) = (&[*a, *b, *c, *d], bytes.get(at + 10..at + 12)) {
            let channels = usize::from(u16::from_le_bytes([*low, *high]));
            if channels > MOST_CHANNELS {
                return Err(SoundError::Channels { channels });
            }
        }
        if [*a, *b, *c, *d] == *b"data" {
            return if said > present { Err(SoundError::Cut { said, present }) } else { Ok(()) };
        }
        // Chunks have an even length.
        at = match usize::try_from(said + said % 2).ok().and_then(|len| (at + 8).checked_add(len)) {
            Some(next) if next < bytes.len() => next,
            _ => break,
        };
    }
    Err(SoundError::Damaged("it has no samples".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of 16 bits in so many channels.
    fn wav(channels: u16, bytes: u32) -> Vec<u8> {
        let format = [[1, 0], channels.to_le_bytes(), [0x80, 0x3e], [0, 0], [0, 0], [0, 0], [2, 0], [16, 0]].concat();
        let data = vec![1; bytes as usize];
        let head = [b"RIFF", &(bytes + 36).to_le_bytes()[..], b"WAVEfmt ", &[16, 0, 0, 0], &format, b"data"].concat();
        [head, bytes.to_le_bytes().to_vec(), data].concat()
    }

    #[test]
    fn channels_that_nobody_has_are_refused() {
        assert_eq!(decode_sound(&wav(2, 640)).expect("it is a sound").len(), 160);
        for channels in [9, 0x7fff, 0x8000, 0xffff] {
            let error = decode_sound(&wav(channels, 640)).expect_err("so many").to_string();
            assert_eq!(error, format!("it has {channels} channels, 8 are the most that are read"));
        }
    }

    #[test]
    fn what_is_read_in_pieces_may_be_longer() {
        let long = wav(1, 31 * 2 * RATE);
        assert_eq!(
            decode_sound(&long).expect_err("too long").to_string(),
            "it lasts longer than 30 seconds, the most that are read"
        );
        assert_eq!(decode_sound_up_to(&long, MOST_SECONDS_IN_PIECES).expect("half an hour").len(), 31 * RATE as usize);
        assert!(matches!(decode_sound_up_to(&long, 20), Err(SoundError::TooLong { most: 20 })));
    }
}
