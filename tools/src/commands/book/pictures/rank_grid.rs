//! Which rank has which coordinates, and which ranks form a group.

use megatron::topology::{Axis, Coords, RankGrid};

use crate::pictures::svg::{Anchor, Box, Colour, HEADING, Svg, TEXT, width};

const MARGIN: f64 = 12.0;
const CELL: (f64, f64) = (66.0, 40.0);
/// Between replicas, and between stages.
const GAP: (f64, f64) = (24.0, 26.0);

/// Where ranks are drawn.
struct Places {
    left: f64,
    top: f64,
    /// From one replica to the next.
    replica: f64,
}

impl Places {
    fn of(&self, at: &Coords) -> Box {
        let x = self.left + at.dp as f64 * self.replica + at.tp as f64 * CELL.0;
        Box(x, self.top + at.pp as f64 * (CELL.1 + GAP.1), CELL.0, CELL.1)
    }
}

/// The ranks of `grid`, stages below each other, of which `per_machine` consecutive ranks are on a
/// machine.
pub fn picture(grid: &RankGrid, per_machine: Option<usize>) -> String {
    let [tp, dp, pp] = [Axis::Tp, Axis::Dp, Axis::Pp].map(|axis| grid.size(axis));
    let title = format!("{} ranks: tp {tp} · dp {dp} · pp {pp}", grid.world());
    let groups = groups(grid);
    let words = groups.iter().map(|(name, groups)| format!("{name} {groups}."));
    let mut svg = Svg::new(&title, &words.collect::<Vec<_>>().join(" "));
    svg.heading((MARGIN, MARGIN + HEADING), &title);

    let places = Places {
        left: MARGIN + width("stage 0", TEXT) + 10.0,
        top: MARGIN + HEADING + 58.0,
        replica: tp as f64 * CELL.0 + GAP.0,
    };
    let right = places.left + dp as f64 * places.replica - GAP.0;
    for index in 0..dp {
        let x = places.left + index as f64 * places.replica;
        let end = x + places.replica - GAP.0;
        let above = places.top - 24.0;
        let name = format!("dp {index}");
        svg.text(((x + end) / 2.0, above - 6.0), TEXT, Anchor::Middle, Colour::INK, &name);
        svg.line((x, above), (end, above), Colour::INK);
    }
    for rank in 0..grid.world() {
        draw_rank(&mut svg, grid, rank, &places);
    }
    let mut widest = right;
    for (machine, first) in (0..grid.world()).step_by(per_machine.unwrap_or(usize::MAX)).enumerate()
    {
        let Box(_, y, _, h) = places.of(&grid.coords(first));
        if per_machine.is_some() {
            let name = format!("machine {machine}");
            svg.label((right + 12.0, y + h / 2.0 + TEXT * 0.35), &name);
            widest = widest.max(right + 12.0 + width(&name, TEXT));
        }
    }
    let last = Coords { tp: 0, cp: 0, dp: 0, pp: pp - 1 };
    let mut y = places.of(&last).1 + CELL.1 + 14.0 + TEXT;
    let indent = groups.iter().map(|(name, _)| width(name, TEXT)).fold(0.0, f64::max);
    for (name, groups) in &groups {
        svg.label((MARGIN, y), name);
        svg.label((MARGIN + indent, y), groups);
        widest = widest.max(MARGIN + indent + width(groups, TEXT));
        y += TEXT + 6.0;
    }
    svg.finish(widest + MARGIN, y - TEXT + MARGIN)
}

/// What the groups of each axis are for, and their ranks.
fn groups(grid: &RankGrid) -> [(String, String); 3] {
    [
        (Axis::Tp, "tp", "share each layer"),
        (Axis::Dp, "dp", "have the same parameters"),
        (Axis::Pp, "pp", "hold the stages of a replica"),
    ]
    .map(|(axis, name, what)| {
        let ranks = |group: &Vec<usize>| {
            let ranks = group.iter().map(usize::to_string).collect::<Vec<_>>();
            format!("{{{}}}", ranks.join(" "))
        };
        let groups = grid.groups(axis).iter().map(ranks).collect::<Vec<_>>();
        (format!("{name} groups {what}:"), groups.join(" "))
    })
}

/// Draws a rank, and the way of activations to its next stage and of gradients back.
fn draw_rank(svg: &mut Svg, grid: &RankGrid, rank: usize, places: &Places) {
    let at = grid.coords(rank);
    let Box(x, y, w, h) = places.of(&at);
    let middle = x + w / 2.0;
    if at.pp == 0 {
        let name = format!("tp {}", at.tp);
        svg.text((middle, y - 8.0), TEXT, Anchor::Middle, Colour::INK, &name);
    }
    if (at.tp, at.dp) == (0, 0) {
        let name = format!("stage {}", at.pp);
        let beside = (x - 10.0, y + h / 2.0 + TEXT * 0.35);
        svg.text(beside, TEXT, Anchor::End, Colour::INK, &name);
    }
    let fill = [Colour::SKY, Colour::ORANGE][at.pp % 2].lighter(at.dp, 2 * grid.size(Axis::Dp));
    svg.cell(Box(x, y, w, h), fill, &format!("rank {rank}"));
    if grid.is_last_stage(rank) {
        return;
    }
    let Box(_, next, ..) = places.of(&grid.coords(grid.next_stage(rank)));
    for (x, tip, up) in [(middle - 5.0, next, -5.0), (middle + 5.0, y + h, 5.0)] {
        svg.line((x, y + h), (x, next), Colour::INK);
        svg.line((x, tip), (x - 3.0, tip + up), Colour::INK);
        svg.line((x, tip), (x + 3.0, tip + up), Colour::INK);
    }
}
