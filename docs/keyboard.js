// Makes usable with the keyboard what the theme lets only a pointer use: areas that scroll, and in a
// narrow window the drawer with the navigation.

// An area that scrolls takes part in the order of Tab; one that does not is no stop there.
const SCROLLING = ".md-typeset__scrollwrap, .md-typeset pre > code"

function updateScrolling(area) {
  if (area.scrollWidth > area.clientWidth + 1) {
    if (!area.hasAttribute("tabindex")) area.setAttribute("tabindex", "0")
    // A name is allowed only for an element that has a role.
    if (!area.hasAttribute("role")) {
      area.setAttribute("role", "region")
      area.setAttribute("aria-label", area.matches("code") ? "Code" : "Table")
    }
  } else if (area.getAttribute("role") === "region") {
    for (const name of ["tabindex", "role", "aria-label"]) area.removeAttribute(name)
  }
}

function watchScrolling() {
  const sizes = new ResizeObserver(entries => entries.forEach(one => updateScrolling(one.target)))
  // The theme removes the attribute again where it has found no pointer.
  const removals = new MutationObserver(all => all.forEach(one => updateScrolling(one.target)))
  for (const area of document.querySelectorAll(SCROLLING)) {
    updateScrolling(area)
    sizes.observe(area)
    removals.observe(area, {attributeFilter: ["tabindex"]})
  }
}

// A label that switches a hidden checkbox becomes a button, as long as `applies` matches.
function makeButton(label, applies, name) {
  const toggle = document.getElementById(label.htmlFor)
  if (!toggle) return  // a page without sections has a label for their list, but no list
  const update = () => {
    if (applies.matches) {
      label.setAttribute("role", "button")
      label.setAttribute("tabindex", "0")
      label.setAttribute("aria-expanded", String(toggle.checked))
      if (name) label.setAttribute("aria-label", name)
    } else {
      for (const one of ["role", "tabindex", "aria-expanded", "aria-label"]) label.removeAttribute(one)
    }
  }
  toggle.addEventListener("change", update)
  applies.addEventListener("change", update)
  update()
  label.addEventListener("keydown", event => {
    if (event.key !== "Enter" && event.key !== " ") return
    event.preventDefault()
    event.stopPropagation()  // the theme clicks a focused label, too
    toggle.click()
  })
}

// In a wide window the navigation is always open, and its headings are no buttons.
function watchDrawer() {
  const narrow = matchMedia("(max-width: 76.234375em)")
  const drawer = document.getElementById("__drawer")
  const menu = document.querySelector(".md-header__button[for=__drawer]")
  makeButton(menu, narrow, "Navigation")
  const headings = ".md-nav label.md-nav__link, .md-nav label.md-nav__title:not([for=__drawer])"
  for (const label of document.querySelectorAll(headings)) makeButton(label, narrow, "")
  document.addEventListener("keydown", event => {
    if (event.key !== "Escape" || !drawer.checked) return
    drawer.click()
    menu.focus()
  })
}

// The theme wraps tables when the page has been loaded.
addEventListener("load", () => {
  watchScrolling()
  watchDrawer()
})
