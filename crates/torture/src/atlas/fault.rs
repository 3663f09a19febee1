//! What can be done to which parts, and what is expected of it.
//!
//! The atlas holds every kind for every part, and every pair of parts that the layouts are to survive. Left out, because no
//! volume that bears one lost node could go on: two nodes at once. Left out, because nobody would be left to serve: both
//! hosts at once.

use super::machine::{Part, Shape};
use anyhow::{Context, Result, ensure};
use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    /// SIGKILL of everything on the machine; started again at the end.
    Kill,
    /// SIGSTOP of everything on the machine.
    Hang,
    /// The machine's cable is pulled.
    Cut,
    /// What the machine sends and gets takes longer, in each direction.
    Slow,
    /// Nothing arrives at the machine; what it sends does.
    Deaf,
    /// Nothing that the machine sends arrives.
    Mute,
}

impl Kind {
    pub const ALL: [Kind; 6] = [Kind::Kill, Kind::Hang, Kind::Cut, Kind::Slow, Kind::Deaf, Kind::Mute];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Kill => "kill",
            Kind::Hang => "hang",
            Kind::Cut => "cut",
            Kind::Slow => "slow",
            Kind::Deaf => "deaf",
            Kind::Mute => "mute",
        }
    }

    /// The machine is silent, but its connections don't end: only time tells clients that it is gone.
    pub fn is_silent(self) -> bool {
        !matches!(self, Kind::Kill | Kind::Slow)
    }
}

/// What is done at the same time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fault(pub Vec<(Kind, Part)>);

impl Fault {
    /// Reads `kill:n1`, `hang:h1+n2` (both hang) or `kill:h1+cut:n2`.
    pub fn parse(text: &str) -> Result<Fault> {
        let mut kind = None;
        let mut hits: Vec<(Kind, Part)> = Vec::new();
        for word in text.split('+') {
            let (own, name) = match word.split_once(':') {
                Some((kind, name)) => (Some(kind), name),
                None => (None, word),
            };
            if let Some(own) = own {
                let known = || Kind::ALL.map(Kind::name).join(", ");
                let found = Kind::ALL.into_iter().find(|kind| kind.name() == own);
                kind = Some(found.with_context(|| format!("no fault '{own}'; there are {}", known()))?);
            }
            let kind = kind.with_context(|| format!("'{text}' does not say what happens; write kill:n1, say"))?;
            let known = || Part::SIX.map(Part::name).join(", ");
            let part = Part::parse(name)
                .filter(|part| Part::SIX.contains(part))
                .with_context(|| format!("no part '{name}'; there are {}", known()))?;
            ensure!(hits.iter().all(|(_, p)| *p != part), "'{text}' names {part} twice");
            hits.push((kind, part));
        }
        let fault = Fault(hits);
        ensure!(fault.nodes() < 2, "'{text}' takes two nodes: volumes that bear the loss of one can't go on then");
        ensure!(fault.hosts() < 2, "'{text}' takes both hosts: nobody is left to serve");
        Ok(fault)
    }

    /// Every kind for every part, then pairs.
    pub fn atlas() -> Vec<Fault> {
        let mut all = Vec::new();
        for part in Part::SIX {
            all.extend(Kind::ALL.map(|kind| Fault(vec![(kind, part)])));
        }
        let both = |kind: Kind, a: Part, b: Part| Fault(vec![(kind, a), (kind, b)]);
        // A host with each node, with and without the majority of etcd; each kind that takes a machine away comes twice.
        let kinds = [Kind::Kill, Kind::Hang, Kind::Cut];
        for (at, node) in Shape::SIX.nodes.iter().copied().enumerate() {
            all.push(both(kinds[at], Part::H1, node));
            all.push(both(kinds[(at + 1) % 3], Part::H2, node));
            all.push(both(kinds[(at + 2) % 3], Part::W, node));
        }
        all.extend([both(Kind::Kill, Part::H1, Part::W), both(Kind::Cut, Part::H2, Part::W)]);
        all.push(Fault(vec![(Kind::Kill, Part::H1), (Kind::Slow, Part::N2)]));
        all.push(Fault(vec![(Kind::Hang, Part::N1), (Kind::Slow, Part::H2)]));
        all
    }

    /// A handful that shows each kind once, and each sort of part.
    pub fn short() -> Vec<Fault> {
        ["kill:h1", "cut:h2", "hang:n1", "cut:n3", "kill:w", "slow:n2", "mute:n3", "kill:h1+n2", "cut:w+n1"]
            .into_iter()
            .map(|text| Fault::parse(text).expect("these are faults"))
            .collect()
    }

    pub fn parts(&self) -> impl Iterator<Item = Part> {
        self.0.iter().map(|(_, part)| *part)
    }

    pub fn hits(&self, part: Part) -> bool {
        self.parts().any(|p| p == part)
    }

    fn nodes(&self) -> usize {
        self.parts().filter(|part| Shape::SIX.is_node(*part)).count()
    }

    fn hosts(&self) -> usize {
        self.parts().filter(|part| part.is_host()).count()
    }

    /// Some host is silent: its clients may only leave when they have heard nothing for long.
    pub fn silences_host(&self) -> bool {
        self.0.iter().any(|(kind, part)| part.is_host() && kind.is_silent())
    }

    /// Frames have to be kept, or dropped in one direction.
    pub fn needs_wire(&self) -> bool {
        self.0.iter().any(|(kind, _)| matches!(kind, Kind::Slow | Kind::Deaf | Kind::Mute))
    }

    /// Whether etcd is left without a majority, so that nobody may take a volume over until the fault ends.
    pub fn stops_metadata(&self) -> bool {
        let lost = self.0.iter().filter(|(kind, part)| Shape::SIX.is_voter(*part) && *kind != Kind::Slow);
        2 * lost.count() >= Shape::SIX.voters.len()
    }

    /// What must hold, in words.
    pub fn expectation(&self) -> &'static str {
        let takes_host = self.0.iter().any(|(kind, part)| part.is_host() && *kind != Kind::Slow);
        match (takes_host, self.stops_metadata()) {
            (true, true) => "requests wait for the fault's end: who serves can't be changed without a majority of etcd",
            (true, false) => "the other host takes over; clients of the one that is gone go over to it",
            (false, true) => "data go on; who serves can't be changed until etcd has its majority again",
            (false, false) => "data go on",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut last = None;
        for (at, (kind, part)) in self.0.iter().enumerate() {
            if at > 0 {
                f.write_str("+")?;
            }
            if last != Some(*kind) {
                write!(f, "{}:", kind.name())?;
            }
            write!(f, "{part}")?;
            last = Some(*kind);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_written_as_they_are_read() {
        for text in ["kill:n1", "hang:h1+n2", "kill:h1+slow:n2"] {
            assert_eq!(Fault::parse(text).expect("it parses").to_string(), text);
        }
        for text in ["n1", "burn:n1", "kill:n9", "kill:n1+n2", "hang:h1+h2", "kill:n1+cut:n1"] {
            assert!(Fault::parse(text).is_err(), "{text}");
        }
        assert!(Fault::short().len() > 5);
    }

    #[test]
    fn the_atlas_hits_every_part_in_every_way_and_never_more_than_layouts_bear() {
        let all = Fault::atlas();
        for part in Part::SIX {
            assert!(Kind::ALL.iter().all(|kind| all.contains(&Fault(vec![(*kind, part)]))));
        }
        assert!(all.iter().all(|fault| fault.nodes() < 2 && fault.hosts() < 2));
        let stops: Vec<String> = all.iter().filter(|f| f.stops_metadata()).map(Fault::to_string).collect();
        assert_eq!(stops.len(), 2, "a witness with a node that has a member: {stops:?}");
    }
}
