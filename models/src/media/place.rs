//! Media for a plan's towers: a file made into what a tower reads, and a place in the prompt for each soft token that
//! becomes of it.

use gemma4c_plan::{MediaTokens, Medium};

use super::{Cut, PictureError, SoundError, decode, decode_sound, frames};

/// Why a file gives a tower nothing to read.
#[derive(Debug, thiserror::Error)]
pub enum MediumError {
    #[error(transparent)]
    Picture(#[from] PictureError),
    #[error(transparent)]
    Sound(#[from] SoundError),
}

/// Patches of a picture, or frames of a sound in one row.
#[derive(Clone, Debug, PartialEq)]
pub struct Grid {
    pub values: Vec<f32>,
    pub columns: u32,
    pub rows: u32,
}

impl Grid {
    /// Makes a file into what a tower for such media reads. A picture gets `budget` soft tokens at most.
    pub fn read(medium: Medium, budget: u32, bytes: &[u8]) -> Result<Grid, MediumError> {
        match medium {
            Medium::Picture { patch, pool } => {
                let patches = Cut { patch, pool, budget }.patches(&decode(bytes)?)?;
                Ok(Grid { values: patches.values, columns: patches.columns, rows: patches.rows })
            }
            medium => Ok(Grid::of_sound(medium, &decode_sound(bytes)?)?),
        }
    }

    /// What a tower for such sound reads of samples.
    pub fn of_sound(medium: Medium, samples: &[f32]) -> Result<Grid, SoundError> {
        let frames = frames(medium, samples)?;
        Ok(Grid { values: frames.values, columns: frames.count, rows: 1 })
    }

    /// Soft tokens that become of it.
    pub fn soft(&self, medium: Medium) -> usize {
        medium.soft(u64::from(self.columns) * u64::from(self.rows)) as usize
    }
}

/// A prompt that holds fewer or more places for media than there are media.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the prompt has places for {places} {} (token {token}), and {given} are given", if *.is_picture { "pictures" } else { "sounds" })]
pub struct PlacesError {
    pub is_picture: bool,
    pub token: u32,
    pub places: usize,
    pub given: usize,
}

/// A prompt as the chat template writes it, with one placeholder a medium, made one with a placeholder for each soft
/// token. `kinds` are the tokens of each tower, `media` the tower and the soft tokens of each medium, in order. Returns
/// also where each medium's first soft token stands.
pub fn expand(
    prompt: &[u32],
    kinds: &[(Medium, MediaTokens)],
    media: &[(usize, usize)],
) -> Result<(Vec<u32>, Vec<u32>), PlacesError> {
    for (kind, (medium, tokens)) in kinds.iter().enumerate() {
        let places = prompt.iter().filter(|id| **id == tokens.placeholder).count();
        let given = media.iter().filter(|(tower, _)| *tower == kind).count();
        if places != given {
            return Err(PlacesError { is_picture: medium.is_picture(), token: tokens.placeholder, places, given });
        }
    }
    let (mut expanded, mut positions) = (Vec::with_capacity(prompt.len()), vec![0; media.len()]);
    let mut next = vec![0; kinds.len()];
    for id in prompt {
        let Some(kind) = kinds.iter().position(|(_, tokens)| tokens.placeholder == *id) else {
            expanded.push(*id);
            continue;
        };
        let own = media.iter().enumerate().filter(|(_, (tower, _))| *tower == kind).nth(next[kind]);
        next[kind] += 1;
        if let Some((index, (_, soft))) = own {
            positions[index] = expanded.len() as u32 + 1;
            expanded.extend(around(kinds[kind].1, *soft));
        }
    }
    Ok((expanded, positions))
}

/// The places of one medium's soft tokens, and the tokens around them.
pub fn around(tokens: MediaTokens, soft: usize) -> Vec<u32> {
    let MediaTokens { begin, placeholder, end } = tokens;
    [&[begin], vec![placeholder; soft].as_slice(), &[end]].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_medium_has_its_places_in_the_prompts_order() {
        let picture = (Medium::Picture { patch: 16, pool: 3 }, MediaTokens { begin: 10, placeholder: 11, end: 12 });
        let sound = (Medium::Samples { frame: 640 }, MediaTokens { begin: 20, placeholder: 21, end: 22 });
        let kinds = [picture, sound];
        let (tokens, positions) = expand(&[1, 21, 2, 11, 11], &kinds, &[(0, 2), (1, 1), (0, 1)]).unwrap();
        assert_eq!(tokens, [1, 20, 21, 22, 2, 10, 11, 11, 12, 10, 11, 12]);
        assert_eq!(positions, [6, 2, 10]);
        let wrong = expand(&[1, 11], &kinds, &[(0, 2), (0, 2)]).unwrap_err();
        assert_eq!(wrong.to_string(), "the prompt has places for 1 pictures (token 11), and 2 are given");
        assert_eq!(expand(&[21], &kinds, &[]).unwrap_err().given, 0);
    }
}
